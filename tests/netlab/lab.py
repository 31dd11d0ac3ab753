"""Nodes on one machine, joined by slow and long links whose bytes the kernel counts.

    python tests/netlab/lab.py --nodes 2 --ranks-per-node 2 --rate 200mbit -- CMD
    python tests/netlab/lab.py --rate 1gbit+20ms -- CMD

A node is a set of namespaces of its own (network, host name, processes, mounts) with one interface, eth0, that
leads over a veth pair to a bridge in one more namespace, the switch. ``tc tbf`` shapes what leaves the node at
eth0 and what enters it at the switch's port. After that rate every packet waits for the link's delay, one way
(delay.py: ARP, and what a node sends to itself, do not). CMD (a script or ``-m MODULE``, with arguments) is started
in each node by torch.distributed.run, or as another --launcher says.

Nothing is made outside these namespaces, so runs cannot collide and nothing can be left behind: each is held by a
process that reads a pipe from this one, and the kernel removes processes, interfaces and namespaces when that
pipe closes, however this process ends (SIGKILL included).

It needs root, or ``unshare --user --map-root-user`` before the command where users may make namespaces.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

INTERFACE = "eth0"
TOOLS = ("ip", "tc", "unshare", "nsenter")
TORCHRUN = (
    sys.executable,
    *shlex.split("-m torch.distributed.run --nnodes {nodes} --nproc-per-node {ranks} --node-rank {node}"),
    *shlex.split("--master-addr {address} --master-port {port}"),
)
# gloo, torch's RPC transport and NCCL else look the host's name up, which no name server knows here.
SOCKETS = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
GRACE = 10.0  # seconds that the other nodes have to end after one failed
TIMED_OUT = 124
# 9000: headers are 0.7% of a full frame, so the interface's count (which sees the kernel's large segments, one
# header each) and the frames on a real wire agree within 1%; at 1500 they would differ by 4%.
MTU = 9000
DELAY = Path(__file__).with_name("delay.py")
# Of nodes at the ends of a long link, as those who run such links set them: windows for 1 Gb/s and 100 ms each way
# (25 MB in flight, and as much again that the kernel counts for its own), and no new slow start after a pause, which
# comes with every step.
LONG_LINK = {
    "tcp_rmem": "4096 131072 67108864",
    "tcp_wmem": "4096 131072 67108864",
    "tcp_slow_start_after_idle": "0",
}


class LabUnavailable(RuntimeError):
    """This machine or user may not make namespaces or shape links; the message says what failed."""


@dataclass(frozen=True)
class LabResult:
    """What one run did. Tuples are by node; ``sent`` and ``received`` are bytes counted by eth0.

    ``again``: at most so many of the node's bytes were sent again; see bytes_sent_again.
    """

    returncodes: tuple[int, ...]
    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]
    again: tuple[int, ...]
    outputs: tuple[str, ...]

    @property
    def returncode(self) -> int:
        """0 if every node's is; else the first that is not."""
        return next((code for code in self.returncodes if code), 0)


class Link(NamedTuple):
    """bits: per second and direction; None where it is not shaped. delay_ms: one way."""

    bits: int | None
    delay_ms: float = 0.0


def parse_link(text: str | None) -> Link:
    """Read a rate in tc's words, or a rate and a delay ('200mbit', '1gbit+20ms', 'none+20ms').

    None and 'none' are a link that is not shaped. Raises ValueError for other words.
    """
    match = re.fullmatch(
        r"(?:none|(\d+(?:\.\d+)?)([kmg]?)bit)(?:\+(\d+(?:\.\d+)?)ms)?", (text or "none").lower()
    )
    bits = int(float(match[1]) * 1000 ** " kmg".index(match[2] or " ")) if match and match[1] else None
    if not match or bits is not None and bits < 1_000_000:
        raise ValueError(
            f"rate {text!r}: write a number and kbit, mbit or gbit, 1mbit or more, or none; after + the delay of one "
            "way in milliseconds, as in 1gbit+20ms"
        )
    return Link(bits, float(match[3] or 0))


def interface_bytes(pid: int | str = "self", interface: str = INTERFACE) -> tuple[int, int]:
    """(sent, received): bytes that an interface of a process's network namespace has counted so far."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            fields = counts.split()
            return int(fields[8]), int(fields[0])
    raise ValueError(f"no interface {interface!r} in the network namespace of process {pid}")


def bytes_sent_again(pid: int | str = "self") -> int:
    """At most so many bytes have TCP connections of a process's network namespace sent again: segments x MTU.

    The kernel sends again what is not acknowledged in time, also when the receiver is only late to run.
    """
    names, values = (
        line.split()
        for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")]) * MTU


class _Namespaces:
    """Namespaces named ``name``, held by a process that lives until this one closes its pipe."""

    def __init__(self, name: str) -> None:
        kinds = ("--net", "--uts", "--pid", "--mount")
        self.name = name
        self.holder = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", "--mount-proc"]
            + ["sh", "-c", 'hostname "$0" && echo up && exec cat', name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C must not take the ground from under the run
        )
        self.delayer: subprocess.Popen | None = None
        assert self.holder.stdout and self.holder.stderr
        if self.holder.stdout.readline() != "up\n":
            said = self.holder.stderr.read().strip()
            raise LabUnavailable(f"namespaces are not allowed ({said}); be root, or try unshare --user -r")
        parent = self.holder.pid
        self.pid = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
        self.inside = ["nsenter", "--target", str(self.pid), *kinds, "--"]
        self.network = ["nsenter", "--target", str(self.pid), "--net", "--"]

    def call(self, command: str) -> None:
        """Set the network up, from outside but for the network, so that process ids mean what they do here."""
        done = subprocess.run([*self.network, *shlex.split(command)], capture_output=True, text=True)
        if done.returncode:
            raise LabUnavailable(f"{command!r} failed in {self.name}: {done.stderr.strip()}")

    def sysctl(self, name: str, value: str) -> None:
        """Set an option of net.ipv4."""
        self.call(f"sh -c 'echo {value} > /proc/sys/net/ipv4/{name}'")

    def delay(self, milliseconds: float) -> None:
        """Delay what comes in at the interface; 0: no more. Nothing may be on its way: it would be lost."""
        if self.delayer is not None:
            self.delayer.communicate()  # closes its standard input, with which it ends
            self.delayer = None
        if not milliseconds:
            return
        self.delayer = subprocess.Popen(  # outside the process namespace: ``kill_all`` must not end it
            [*self.network, sys.executable, str(DELAY), INTERFACE, str(milliseconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.delayer.stdout and self.delayer.stderr
        if self.delayer.stdout.readline() != "up\n":
            said = self.delayer.stderr.read().strip().rpartition("\n")[2]
            raise LabUnavailable(f"delay.py cannot delay packets in {self.name}: {said}")

    def check_delay(self) -> None:
        """Raise RuntimeError if packets are no longer delayed, or some were lost."""
        if self.delayer is not None and self.delayer.poll() is not None:
            ended, self.delayer = self.delayer, None
            said = ended.communicate()[1]
            raise RuntimeError(f"delay.py in {self.name} ended: {said.strip()}")

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.inside, "env", f"--chdir={os.getcwd()}", *command],  # entering mounts loses the folder
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def kill_all(self) -> None:
        """End every process of a run, not the holder: in its process namespace -1 means all but the first."""
        subprocess.run([*self.inside, "sh", "-c", "kill -KILL -1"], capture_output=True)

    def close(self) -> None:
        self.delay(0)
        self.holder.kill()  # --kill-child: the first process dies with it, and all others with that
        self.holder.communicate()


class Lab:
    """``nodes`` nodes joined at ``rate``; a context manager. ``with Lab(2, "200mbit") as lab: lab.run([...])``.

    rate: of every node's link, with its delay, as ``parse_link`` reads it. racks: groups of consecutive nodes, with a
    switch each. uplink: the rate of each rack's link to the others.
    Raises LabUnavailable on entry where namespaces or shaping are not allowed, ValueError for a bad rate.
    """

    def __init__(
        self, nodes: int = 2, rate: str | None = None, racks: int = 1, uplink: str | None = None
    ) -> None:
        if not 2 <= nodes <= 200:
            raise ValueError(f"{nodes} nodes: a lab joins 2 to 200")
        if nodes % racks:
            raise ValueError(f"{nodes} nodes do not divide into {racks} racks")
        if parse_link(uplink).delay_ms:
            raise ValueError(f"uplink {uplink!r}: delays are those of nodes' links")
        self.nodes, self.racks, self.uplink = nodes, racks, parse_link(uplink).bits
        self.rate = rate
        parse_link(rate)
        self.members: list[_Namespaces] = []

    def __enter__(self) -> Lab:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise LabUnavailable(
                f"programs not found: {', '.join(missing)} (iproute2 and util-linux have them)"
            )
        try:
            self._build()
            self.shape(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self.members:
            self.members.pop().close()

    def address(self, node: int) -> str:
        return f"10.0.0.{node + 1}"

    def _build(self) -> None:
        switch = _Namespaces("switch")
        self.members.append(switch)
        for rack in range(self.racks):
            switch.call(f"ip link add rack{rack} type bridge")
            switch.call(f"ip link set rack{rack} addrgenmode none up")
        for rack in range(self.racks if self.racks > 1 else 0):
            self._join(switch, rack)
        for i in range(self.nodes):
            node = _Namespaces(f"node{i}")
            self.members.append(node)
            ends = f"ip link add port{i} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {node.pid}"
            switch.call(ends)
            # addrgenmode none: no IPv6 chatter in the counts.
            switch.call(f"ip link set port{i} addrgenmode none master rack{i * self.racks // self.nodes} up")
            node.call(f"ip link set {INTERFACE} addrgenmode none")
            node.call(f"ip address add {self.address(i)}/24 dev {INTERFACE}")
            node.call(f"ip link set {INTERFACE} up")
            node.call("ip link set lo up")
            # Linux's default, whatever this machine uses.
            node.call("sh -c 'echo cubic > /proc/sys/net/ipv4/tcp_congestion_control || true'")

    def _join(self, switch: _Namespaces, rack: int) -> None:
        """Join a rack to the switch of the racks; the link has the rate ``uplink`` in each direction."""
        if rack == 0:
            switch.call("ip link add bridge type bridge")
            switch.call("ip link set bridge addrgenmode none up")
        switch.call(f"ip link add up{rack} mtu {MTU} type veth peer name down{rack} mtu {MTU}")
        for end, master in ((f"up{rack}", f"rack{rack}"), (f"down{rack}", "bridge")):
            switch.call(f"ip link set {end} addrgenmode none master {master} up")
            if self.uplink is not None:
                switch.call(f"tc qdisc replace dev {end} root tbf {_bucket(self.uplink)}")

    def shape(self, rate: str | None) -> None:
        """Set the rate and delay of every node's link, each direction; None or 'none': as fast as the machine."""
        switch, *nodes = self.members
        bits, delay_ms = parse_link(rate)
        shaped = parse_link(self.rate).bits is not None
        for node in nodes:
            node.delay(delay_ms)
            for name, value in LONG_LINK.items() if delay_ms else ():
                node.sysctl(name, value)
        ends = [(node, INTERFACE) for node in nodes] + [(switch, f"port{i}") for i in range(self.nodes)]
        for member, interface in ends:
            if bits is not None:
                member.call(f"tc qdisc replace dev {interface} root tbf {_bucket(bits)}")
            elif shaped:
                member.call(f"tc qdisc delete dev {interface} root")
        self.rate = rate

    def uplink_bytes(self) -> list[int]:
        """Bytes that each rack has sent to the others so far."""
        racks = range(self.racks if self.racks > 1 else 0)
        return [interface_bytes(self.members[0].pid, f"up{rack}")[0] for rack in racks]

    def counts(self) -> list[tuple[int, int, int]]:
        """(sent, received, sent again) bytes of every node so far."""
        return [(*interface_bytes(node.pid), bytes_sent_again(node.pid)) for node in self.members[1:]]

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_node: int = 1,
        launcher: Sequence[str] = TORCHRUN,
        environ: Mapping[str, str] | None = None,
        echo: bool = False,
        timeout: float | None = None,
    ) -> LabResult:
        """Run ``command`` in every node behind ``launcher`` and wait.

        launcher: words put before the command; {node}, {nodes}, {ranks}, {address} and {port} are filled in; empty:
        the command itself, once per node. echo: print lines as they come, with the node's name. timeout:
        seconds, then the run is ended and its return codes are 124.
        """
        facts = {"nodes": self.nodes, "ranks": ranks_per_node, "address": self.address(0), "port": 29500}
        commands = [
            [*(word.format(node=i, **facts) for word in launcher), *command] for i in range(self.nodes)
        ]
        return self.run_each(commands, environ=environ, echo=echo, timeout=timeout)

    def run_each(
        self,
        commands: Sequence[Sequence[str]],
        *,
        environ: Mapping[str, str] | None = None,
        echo: bool = False,
        timeout: float | None = None,
    ) -> LabResult:
        """Run a command of its own in each node; see run."""
        nodes = self.members[1:]
        if len(commands) != len(nodes):
            raise ValueError(f"{len(commands)} commands for {len(nodes)} nodes: give one each")
        before, began = self.counts(), time.monotonic()
        env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **SOCKETS, **(environ or {})}
        lines: list[list[str]] = [[] for _ in nodes]
        running: list[subprocess.Popen] = []
        try:
            for node, command in zip(nodes, commands, strict=True):
                running.append(node.start(command, env))
            readers = [
                threading.Thread(target=_read, args=(process, node.name if echo else None, into), daemon=True)
                for process, node, into in zip(running, nodes, lines, strict=True)
            ]
            for reader in readers:
                reader.start()
            late = _wait(running, began + timeout if timeout else None)
            seconds = time.monotonic() - began
        finally:
            for node in nodes:
                node.kill_all()
            for process in running:
                process.wait()
        for reader in readers:
            reader.join()
        for node in nodes:
            node.check_delay()
        passed = zip(self.counts(), before, strict=True)
        spent = [[n - n0 for n, n0 in zip(now, then, strict=True)] for now, then in passed]
        sent, received, again = zip(*spent, strict=True)
        return LabResult(
            returncodes=tuple(TIMED_OUT if late else process.returncode for process in running),
            seconds=seconds,
            sent=sent,
            received=received,
            again=again,
            outputs=tuple("".join(text) for text in lines),
        )


def _bucket(bits: int) -> str:
    # burst: what may leave at once after a pause. It must hold a 64 KiB segment and what is due while a timer on a
    # busy machine is late (2 ms); more would make short messages look free.
    # limit: deeper than any socket's send buffer, so that nothing is dropped and sent (and counted) twice.
    # Measured with transfer.py, best of 3 on a machine with 7 runnable programs per core: 51.1, 198.8 and 973 Mb/s
    # of payload at 50, 200 and 1000 Mb/s (headers are 0.7%), 1.001 to 1.004 bytes counted per byte sent.
    burst = max(128 * 1024, bits // 8 // 500)
    return f"rate {bits}bit burst {burst}b limit {64 * 2**20}b"


def _read(process: subprocess.Popen, name: str | None, into: list[str]) -> None:
    assert process.stdout
    for line in process.stdout:
        into.append(line)
        if name is not None:
            sys.stdout.write(f"{name}| {line}")
            sys.stdout.flush()


def _wait(running: Sequence[subprocess.Popen], deadline: float | None) -> bool:
    """Until all have ended, one has failed for longer than GRACE, or the deadline passed: then True."""
    failed_at = None
    while any(process.poll() is None for process in running):
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return True
        if failed_at is None and any(process.poll() for process in running):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE:
            return False
        time.sleep(0.02)
    return False


def report(result: LabResult) -> str:
    rows = [f"{'':8}{'sent':>16}{'received':>16}   bytes at {INTERFACE}"]
    counts = [*zip(result.sent, result.received, strict=True), (sum(result.sent), sum(result.received))]
    names = [*(f"node{i}" for i in range(len(result.sent))), "all"]
    rows += [f"{n:8}{sent:16,}{received:16,}" for n, (sent, received) in zip(names, counts, strict=True)]
    return "\n".join([*rows, f"{result.seconds:.1f} s, return codes {list(result.returncodes)}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument(
        "--rate", default="none", help="of each node's link and direction: 200mbit, none, 1gbit+20ms"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument(
        "--launcher",
        default=shlex.join(TORCHRUN),
        help="words before CMD; {node}, {nodes}, {ranks}, {address}, {port} are filled in (default: %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: say -- CMD")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with Lab(options.nodes, options.rate) as lab:
            result = lab.run(
                command,
                ranks_per_node=options.ranks_per_node,
                launcher=shlex.split(options.launcher),
                echo=True,
                timeout=options.timeout,
            )
    except (LabUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(report(result))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
