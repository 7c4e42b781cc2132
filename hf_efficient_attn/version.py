"""The version of this package, in the one place from which everything else reads it."""

__version__ = "0.2.0"
