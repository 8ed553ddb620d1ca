"""Losses, optimizers, schedules and batches."""
