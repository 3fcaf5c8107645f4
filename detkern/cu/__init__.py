"""The CUDA backend: kernels, their loader, the tile tables and the launch code. `backend.BACKEND` is what the registry
loads; nothing here imports CuPy before a CUDA device is asked for."""
