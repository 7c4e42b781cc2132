"""A small class-conditional BigGAN on digits: training, a feature network, and the measures of generated pictures."""
