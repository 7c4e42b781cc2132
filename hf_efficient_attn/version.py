"""The version of this package, in the one place from which everything else reads it."""

__version__ = "0.3.0"
