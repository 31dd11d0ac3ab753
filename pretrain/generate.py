#!/usr/bin/env python
"""Continue a text with a trained model: the same as ``megazero generate``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="generate"))
