"""Compares one trial step of a model with random weights with the planner's prediction."""
