"""What a training loop needs: precision, optimizers, schedules, checkpointing, saving."""
