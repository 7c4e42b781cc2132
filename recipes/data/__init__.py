"""Data sets of the recipes, each from local files in its official layout or from the hub, checked before training."""
