"""One trial step of a random-weight model, beside the planner's prediction."""
