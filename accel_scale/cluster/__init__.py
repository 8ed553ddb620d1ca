"""Scripts that start a launch on several nodes."""
