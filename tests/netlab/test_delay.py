"""Links with delay: packets wait for so long, none is lost, and what holds them ends with the lab."""

from __future__ import annotations

import subprocess

from tests.netlab.lab import Lab
from tests.netlab.test_lab import transfer, wait_until


def queues(lab: Lab) -> list[list[list[int]]]:
    """By node, netfilter's queues: number, process, waiting now, what is copied (2), lost (2), numbered so far, 1."""
    out = []
    for node in lab.members[1:]:
        command = [*node.inside, "cat", "/proc/net/netfilter/nfnetlink_queue"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        out.append([[int(word) for word in line.split()] for line in said.stdout.splitlines()])
    return out


def test_every_packet_waits_and_none_is_lost_until_links_are_shaped_anew(netlab):
    """The seconds of a transfer have its round trip."""
    lab = netlab(2, "none+30ms")
    assert transfer(lab, 1 << 16)[0] >= 0.060
    lab.shape("200mbit+70ms")
    assert transfer(lab, 1 << 22)[0] >= 0.140
    assert wait_until(lambda: not any(waiting for ((_, _, waiting, *_),) in queues(lab)))
    for ((*_, lost, lost_by_user, numbered, _),) in queues(lab):
        assert lost == lost_by_user == 0 and numbered > 20
    lab.shape("50mbit")
    assert queues(lab) == [[], []]
    assert transfer(lab, 1 << 16)[0] > 0
