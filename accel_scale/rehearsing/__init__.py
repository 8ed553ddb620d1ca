"""A launch run small on CPU processes: saved, resumed, reloaded."""
