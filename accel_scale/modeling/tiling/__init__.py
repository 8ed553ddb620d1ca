"""Modules that treat each token alone, computed over slices of the rows."""
