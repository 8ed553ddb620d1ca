"""`ScalePlugin`: accel-scale's settings in your own script."""
