"""Callbacks that every run of the command line has."""
