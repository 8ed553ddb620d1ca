"""Flags: declared once, parsed strictly, each value with where it came from."""
