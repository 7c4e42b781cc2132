"""Parts of the BigGAN recipes: digits, networks, sampling, and the measures of generated pictures."""
