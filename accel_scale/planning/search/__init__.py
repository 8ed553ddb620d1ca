"""The search over settings that are left open, and the files it writes."""
