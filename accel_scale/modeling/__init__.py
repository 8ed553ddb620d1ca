"""One model for any loop: loading, adapters, attention, checkpointing, precision."""
