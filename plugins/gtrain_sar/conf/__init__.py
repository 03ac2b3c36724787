"""Configuration of the sar strategy."""
