"""How a process ends: the one line that says why, the exit status, and the launcher above it."""
