"""`ScalePlugin`: accel-scale's settings in somebody else's script."""
