"""Gradients by the contract: the rules, free of any framework (rules.py), and their bindings (torch.py)."""
