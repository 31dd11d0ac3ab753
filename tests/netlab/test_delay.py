"""Links with delay: packets wait for so long, none is lost or overtaken, and what holds them ends with the lab."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.netlab.lab import Lab, Link, parse_link
from tests.netlab.test_lab import ALL_GATHER, HERE, end_with_a_killed_owner

PROGRAM = [sys.executable, str(HERE / "datagrams.py")]
COUNT = 200


def queues(lab: Lab) -> list[list[list[int]]]:
    """By node, netfilter's queues: number, process, waiting now, what is copied (2), lost (2), numbered so far, 1."""
    out = []
    for node in lab.members[1:]:
        command = [*node.inside, "cat", "/proc/net/netfilter/nfnetlink_queue"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        out.append([[int(word) for word in line.split()] for line in said.stdout.splitlines()])
    return out


def on_their_way(lab: Lab, receiver: int) -> list[float]:
    """Seconds of each of COUNT numbered datagrams, which arrived unchanged and in order."""
    commands = [[*PROGRAM, "send", lab.address(receiver), str(COUNT)]] * 2
    commands[receiver] = [*PROGRAM, "receive", str(COUNT)]
    result = lab.run_each(commands, timeout=60)
    assert result.returncode == 0, result.outputs
    return [float(word) for word in result.outputs[receiver].split()]


def test_every_packet_waits_and_none_is_lost_or_overtaken(netlab, tmp_path):
    lab = netlab(2, "200mbit+20ms")
    for receiver in (0, 1):
        seconds = on_their_way(lab, receiver)
        assert len(seconds) == COUNT and min(seconds) >= 0.020
        print(f"\ndelayed by {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms where 20 were asked")
    script = tmp_path / "gather.py"
    script.write_text(ALL_GATHER)
    result = lab.run([], launcher=[sys.executable, str(script), "{node}", "{address}"], timeout=60)
    assert result.returncode == 0 and all("gathered" in text for text in result.outputs), result.outputs
    for _, _, waiting, _, _, *lost, numbered, _ in (queue for (queue,) in queues(lab)):
        assert waiting == 0 and lost == [0, 0] and numbered > COUNT


def test_a_round_trip_is_two_delays_and_shaping_anew_changes_it(netlab):
    lab = netlab(2, "none+30ms")
    program = [sys.executable, str(HERE / "transfer.py")]

    def round_trip() -> float:
        commands = [[*program, "serve"], [*program, "send", lab.address(0), str(1 << 16)]]
        result = lab.run_each(commands, timeout=60)
        assert result.returncode == 0, result.outputs
        return float(result.outputs[1])

    assert round_trip() >= 0.060
    lab.shape("50mbit+70ms")
    assert round_trip() >= 0.140
    lab.shape("50mbit")
    assert queues(lab) == [[], []]
    assert round_trip() > 0


def test_a_killed_lab_leaves_no_process_that_holds_packets(netlab):
    netlab(2, "none+10ms")  # skips where no lab can be made
    assert (
        end_with_a_killed_owner("Lab(2, 'none+10ms')", "[node.delayer.pid for node in lab.members[1:]]") == 2
    )


def test_how_links_are_written():
    assert parse_link("1gbit+20ms") == Link(1_000_000_000, 20.0)
    assert parse_link("none+0.5ms") == Link(None, 0.5)
    assert parse_link(None) == parse_link("none") == Link(None)


@pytest.mark.parametrize("rate", ["1gbit+20", "1gbit+20s", "1gbit+", "+20ms", "1gbit+-1ms"])
def test_bad_delay(netlab, rate):
    with pytest.raises(ValueError, match="rate '"):
        netlab(2, rate)
