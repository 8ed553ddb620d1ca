"""Merges adapters into their base model."""
