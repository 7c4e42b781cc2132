"""Evaluation of methods in models: capture of activations, errors, timing, calibration, and reports of the commands."""
