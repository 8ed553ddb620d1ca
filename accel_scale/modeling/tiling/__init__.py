"""Modules that treat each token separately, computed over slices of the rows."""
