"""Kernels for some devices."""
