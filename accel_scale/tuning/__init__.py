"""Searching a recipe's flags with Optuna, each trial a launch of its own."""
