#!/usr/bin/env python
"""Checkpoints to folders of Hugging Face and back: to-hf, from-hf, check, flags. The same as ``megazero convert``."""

import sys

from megazero.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
