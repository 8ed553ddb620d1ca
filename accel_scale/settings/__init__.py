"""Resolve flags, launch and device to one consistent set of settings."""
