#!/usr/bin/env python
"""Checkpoints to Hugging Face and back, and from Megatron. The same as ``megazero convert``."""

import sys

from megazero.convert.command import main
from megazero.log.safe_stream import guard_streams

if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
