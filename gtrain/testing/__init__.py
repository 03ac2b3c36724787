"""Test utilities for backends in other packages; start with :mod:`gtrain.testing.conformance`."""
