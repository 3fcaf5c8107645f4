"""Layers whose bits follow a contract, and what puts them into a model."""
