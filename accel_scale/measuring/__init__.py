"""Measures throughput, memory, collectives and row lengths."""
