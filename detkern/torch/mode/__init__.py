"""batch_invariant_mode: what PyTorch calls products and row operations, by the functions of ../functions."""
