"""As sar_conv_program.py, with all messages cut into pieces, in every mode."""

from __future__ import annotations

import sys

import sar_conv_program

from gtrain.engine import halo
from gtrain.engine.attention import fused

if __name__ == "__main__":
    halo.PIECE_BYTES = halo.LEAST_BYTES = 128
    fused.MOST_ROWS = fused.LEAST_ROWS = 2  # the test's graph has tens of nodes
    fused.ReaderPlan.saves_traffic = lambda self, mode: True  # type: ignore[method-assign]
    sys.exit(sar_conv_program.main())
