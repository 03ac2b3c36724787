"""Defaults of the two strategies; a package, so that Hydra finds the files once it is installed."""
