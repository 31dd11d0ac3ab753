"""python -m megazero.config FLAGS: check a command line without torch and print what it resolves to.

Under torchrun's variables (RANK, WORLD_SIZE, LOCAL_WORLD_SIZE) the rules over the size of the world are checked too.
"""

from __future__ import annotations

import sys

from megazero.config import World, parse_or_exit
from megazero.mesh.launch import read_launch

if __name__ == "__main__":
    launch = read_launch()
    world = World(launch.world_size, launch.local_world_size) if launch.launcher != "single process" else None
    print("\n".join(parse_or_exit(sys.argv[1:], world).describe(world)))
