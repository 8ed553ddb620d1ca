"""Rehearses a launch in small on CPU processes: saves, resumes and reloads it."""
