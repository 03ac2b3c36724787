"""Connections between machines, or with keys: ZeroMQ with CURVE."""
