"""Contradictions between recipe, launch file and machine, found before a launch."""
