"""The parts of the pretraining recipe."""
