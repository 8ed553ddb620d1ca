"""Facts and memory of models without a hand-written description, from one fake step of their real classes."""
