"""The C ABI of detkern's shared libraries: abi.h, its ctypes mirrors, the loader, and their build."""
