"""Meters: tokens per second, memory, collectives, row lengths."""
