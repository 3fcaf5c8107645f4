"""The CPU: C++ kernels built on first use, a NumPy version with the same bits, and the backend over both."""
