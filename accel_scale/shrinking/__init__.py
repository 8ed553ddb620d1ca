"""Tiny models with the architecture of real ones."""
