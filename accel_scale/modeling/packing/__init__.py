"""Rows that hold several documents: what the host knows of them, and attention of variable length."""
