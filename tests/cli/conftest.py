"""The fixtures of the commands, for all files of this folder."""

from commands import _short, figures, made, photographs, text  # noqa: F401
