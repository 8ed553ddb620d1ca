"""Launch files: reading, checking, and running them on CPU processes."""
