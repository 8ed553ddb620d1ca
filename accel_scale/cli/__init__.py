"""The `accel-scale` command: parses, calls, prints."""
