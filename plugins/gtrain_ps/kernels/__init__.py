"""Compiled loops over sparse rows and blocks of a table; each is nogil and runs in the thread that calls it."""
