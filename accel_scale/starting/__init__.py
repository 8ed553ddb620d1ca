"""What a recipe does before it loads anything: refuse at once what can be refused."""
