"""The portable backend: kernels in Triton, for devices that have no kernels of their own yet, and as a second opinion
with the same bits on those that do. Nothing here imports Triton or PyTorch before the backend is used on a device."""
