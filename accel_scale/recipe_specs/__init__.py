"""The `RECIPE` declarations of recipes, on which the commands are based."""
