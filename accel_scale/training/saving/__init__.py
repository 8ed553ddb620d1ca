"""The final model: gathered, written, read back and compared."""
