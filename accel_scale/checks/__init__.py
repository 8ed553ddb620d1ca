"""Find contradictions between recipe, launch file and machine before a launch."""
