"""The command ``megazero calibrate``: started on every rank. It answers --help and mistakes without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.calibrate.options import CalibrationRequest, help_text, read_request
from megazero.config import run_command
from megazero.config.options.cluster import load_cluster
from megazero.mesh.launch import Launch, take_launch
from megazero.mesh.starter import start_again
from megazero.plan.command import plan
from megazero.plan.options import PlanConfig, PlanRequest


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if the cluster file is written, 1 if --pays found nothing that fits, 2 if the flags
    or the launcher's words are wrong."""
    try:
        launch, ranks, words = take_launch(argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    def run() -> int:
        request = read_request(words)
        if ranks is None:
            return _calibrate(request, launch)
        return start_again(argv, words, ranks, device=request.values.get("device", "auto"))

    return run_command("calibrate", words, help_text, run, launch.rank)


def _calibrate(request: CalibrationRequest, launch: Launch) -> int:
    from megazero.calibrate.run import calibrate, join  # brings torch

    try:
        joined = join(request, launch)
    except ValueError as error:  # this rank alone may know: the others wait for it
        print(f"{launch.host}, rank {launch.rank}: {error}", file=sys.stderr, flush=True)
        return 2
    calibrate(request, launch, *joined)
    if not request.options.pays or launch.rank:
        return 0
    cluster = load_cluster(request.options.cluster_output)
    values = {**request.plan, "ranks_per_node": cluster.ranks_per_node}
    return plan(PlanRequest(values, cluster, "exact", PlanConfig(pays=True)))
