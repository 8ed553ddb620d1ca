"""Validation loss, exact match, progress."""
