"""What a recipe says about itself in `RECIPE`, from which the commands work."""
