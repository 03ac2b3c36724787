"""Configuration of the single strategy."""
