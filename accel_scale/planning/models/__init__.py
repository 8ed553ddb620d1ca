"""Derives the facts that planning needs from a model's configuration: parameters, layers, attention."""
