"""Every case of dgl_conv_cases.py over ranks, beside DGL on the whole graph; arguments as sar_conv_program.py."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DGLBACKEND", "pytorch")

import dgl_conv_cases  # noqa: E402
import sar_conv_cases  # noqa: E402
import sar_conv_program  # noqa: E402

if __name__ == "__main__":
    sar_conv_cases.LISTED, sar_conv_cases.BEYOND = dgl_conv_cases.CASES, {}
    sys.exit(sar_conv_program.main())
