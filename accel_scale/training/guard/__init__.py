"""Detecting and skipping bad optimizer steps, under every engine."""
