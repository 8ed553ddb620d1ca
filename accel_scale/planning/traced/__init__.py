"""Bytes of a step of models whose layers are traced."""
