"""Data sets of the recipes: text, GLUE, the Long Range Arena, and pictures."""
