"""Products and row operations on tensors, with gradients, and the ops that PyTorch's dispatcher knows."""
