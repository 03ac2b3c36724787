"""Compiled loops of the training step; imported by ranks alone, never in front of a fork.

numba's cache notices a changed caller but no changed callee in another file: whoever edits ``numbers.py`` removes
``__pycache__`` here.
"""
