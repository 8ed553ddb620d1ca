"""Handling of exhausted memory and of collectives that hang."""
