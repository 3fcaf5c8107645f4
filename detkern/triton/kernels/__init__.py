"""The kernels: Triton code, imported only once a device runs them."""
