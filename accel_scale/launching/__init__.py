"""Launch files: read them, check them, and run them on CPU processes."""
