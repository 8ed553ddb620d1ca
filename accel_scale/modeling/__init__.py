"""Model setup for any loop: loading, adapters, attention, checkpointing, precision."""
