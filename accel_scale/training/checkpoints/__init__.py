"""Checkpoints: their contents, validity, writing and resuming."""
