"""Callbacks of the runs that the command line starts."""
