"""Configurations of axolotl, LLaMA-Factory and TRL, read into flags of our recipes: every key is mapped or named."""
