"""Searches a recipe's flags with Optuna; every trial is a separate launch."""
