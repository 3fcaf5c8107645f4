"""The gradient of a bias."""
