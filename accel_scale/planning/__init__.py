"""Will it fit, how fast, which strategy: pure arithmetic on model facts, without torch.

Import from the modules: `model_facts`, `training_setup`, `memory`, `hardware`, `timing`, `search`, `scaling_laws`.
"""
