"""How a process ends: the line that says why, the exit status, and the launcher above it."""
