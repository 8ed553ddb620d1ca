"""Meters: tokens per second, memory, collectives."""
