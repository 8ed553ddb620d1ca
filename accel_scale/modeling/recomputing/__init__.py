"""Activation checkpointing: its policies, and layers that are recomputed several at once."""
