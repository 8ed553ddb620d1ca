"""Converts axolotl, LLaMA-Factory and TRL configurations to flags of our recipes; every key is mapped or reported."""
