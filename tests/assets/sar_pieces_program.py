"""As sar_conv_program.py, with all messages cut into pieces, in every mode."""

from __future__ import annotations

import sys

import sar_conv_program

from gtrain.engine.attention import readers
from gtrain_sar import point_to_point

if __name__ == "__main__":
    point_to_point.PIECE_BYTES = point_to_point.LEAST_BYTES = 128
    readers.MOST_ROWS = readers.LEAST_ROWS = 2  # the test's graph has tens of nodes
    readers.ReaderPlan.saves_traffic = lambda self, mode: True  # type: ignore[method-assign]
    sys.exit(sar_conv_program.main())
