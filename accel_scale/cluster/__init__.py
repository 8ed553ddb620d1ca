"""Writes scripts that start a launch on several nodes."""
