"""python -m megazero.config FLAGS checks a command line without torch and prints what it resolves to.

Under a launcher's variables (mesh/launch.py), or with --nproc-per-node N, it also checks the rules over the size of
the world.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from megazero.config import World, parse_or_exit
from megazero.config.options.data_inputs import run_vocabulary
from megazero.config.summary import describe
from megazero.mesh.launch import take_launch


def main() -> int:
    """Print the configuration that these flags give, as a run would have it, and return the exit status."""
    try:
        launch, ranks, flags = take_launch(sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    world = None if ranks is None else World(ranks, ranks)
    if launch.launcher != "single process":
        world = World(launch.world_size, launch.local_world_size or 0)
    config = parse_or_exit(flags, world)
    vocabulary = run_vocabulary(config.data.tokenizer_type, config.model.vocab_size)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    print("\n".join(describe(config, world)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
