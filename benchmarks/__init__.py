"""Measurements and recorded runs; each module is a command (`python -m benchmarks.<name>`) and says what it needs."""
