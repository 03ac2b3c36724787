"""Tests for backends of other packages: :mod:`gtrain.testing.conformance`, and the commands that they run."""
