"""Compiled loops of the training step; imported by ranks alone, never in front of a fork."""
