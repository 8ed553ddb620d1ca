"""What a step costs: memory, time, communication, by strategy."""
