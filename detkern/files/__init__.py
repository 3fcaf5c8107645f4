"""Where built and compiled binaries are kept, and how they are sealed."""
