"""Log-probabilities straight from hidden states: a product whose columns are folded as they are made."""
