"""Moore Threads and Ascend devices: kernels in shared libraries behind abi.h, their build commands, and the backend
that calls them."""
