"""Parts of a training loop: precision, optimizers, schedules, checkpointing, saving."""
