"""As sar_conv_program.py, with all messages cut into pieces, in every mode."""

from __future__ import annotations

import sys

import sar_conv_program

from gtrain_sar import messages
from gtrain_sar.attention import reverse

if __name__ == "__main__":
    messages.PIECE_BYTES = messages.LEAST_BYTES = 128
    reverse.MOST_ROWS = reverse.LEAST_ROWS = 2  # the test's graph has tens of nodes
    reverse.Reverse.pays = lambda self, mode: True  # type: ignore[method-assign]
    sys.exit(sar_conv_program.main())
