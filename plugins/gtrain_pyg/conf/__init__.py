"""Configuration of the pyg strategy."""
