"""Layers and losses that strategies know how to re-home."""
