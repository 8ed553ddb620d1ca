"""The cost of a step by strategy: memory, time, communication."""
