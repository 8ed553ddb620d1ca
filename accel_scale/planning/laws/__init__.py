"""Scaling laws: parameters, tokens, compute and loss."""
