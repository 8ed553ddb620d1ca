"""Activation checkpointing: its policies, and groups of layers that are recomputed together."""
