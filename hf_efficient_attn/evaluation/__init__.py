"""What a method costs and gains on a model: captured activations, errors, times, calibration, reports."""
