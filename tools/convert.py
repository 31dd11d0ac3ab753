#!/usr/bin/env python
"""Checkpoints to Hugging Face and back, and from Megatron. The same as ``megazero convert``."""

import sys

from megazero.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
