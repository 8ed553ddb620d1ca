"""Data sets: loading, formats, mixtures, loaders, and the embedded default."""
