"""Which strategy: the search over what is left open, and the files it writes."""
