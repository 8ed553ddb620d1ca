"""The `accel-scale` command: parse flags, call the library, print."""
