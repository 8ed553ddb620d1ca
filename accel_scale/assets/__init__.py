"""The embedded tiny model and data, with the scripts that regenerate them."""
