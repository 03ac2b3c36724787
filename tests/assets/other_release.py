"""The command as another release of gtrain: ``python other_release.py RELEASE ARGUMENTS``."""

import sys

import gtrain

gtrain.__version__ = sys.argv.pop(1)

from gtrain.cli import main  # noqa: E402 - modules take the release over when they are imported

main()
