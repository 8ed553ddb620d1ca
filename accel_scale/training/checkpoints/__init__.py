"""Checkpoints: what is in one, when it is good, how it is written and resumed from."""
