"""Rows that hold several documents: facts about them on the host, and variable-length attention."""
