"""The arithmetic that replays are written in: binary32 and tensor-core steps in NumPy, and the thread's floating-point
modes."""
