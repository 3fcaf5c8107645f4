"""Gradients by the contract, bound to frameworks. The rules, free of any, are in detkern/operations."""
