"""FP8 products with a scale for each block of 128."""
