#!/usr/bin/env python
"""Convert checkpoints to and from Hugging Face, and from Megatron: the same as ``megazero convert``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="convert"))
