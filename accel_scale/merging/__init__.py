"""Merging adapters into their base."""
