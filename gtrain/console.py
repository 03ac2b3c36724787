"""Where tables are printed."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDTH = 120
"""Columns of a pipe or a file, which have no width."""


def table_console() -> Console:
    """Return the console of standard output: as wide as the terminal, if it is one."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)
