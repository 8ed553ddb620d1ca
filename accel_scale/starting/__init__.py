"""What a recipe does before it loads anything: refuse at once whatever can be refused."""
