"""Flags: declared once, parsed strictly, each value with its origin."""
