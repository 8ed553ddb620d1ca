"""Inference with saved models: loads a whole model or an adapter, chats with it and evaluates it."""
