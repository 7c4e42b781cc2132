"""The fixtures of the commands, for all files of this folder."""

from helpers.commands import _quick, figures, made, photographs, text  # noqa: F401
