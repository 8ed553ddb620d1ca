"""Optimizer steps that should not be taken, under every engine."""
