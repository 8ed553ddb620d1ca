"""Mixins for HF `Trainer` and TRL's trainers."""
