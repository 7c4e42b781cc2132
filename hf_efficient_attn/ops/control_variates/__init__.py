"""EVA: a window exactly, and one control variate for each chunk of the other keys."""
