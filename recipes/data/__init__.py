"""Data of the recipes."""
