"""Bytes of a step for models whose layers are traced."""
