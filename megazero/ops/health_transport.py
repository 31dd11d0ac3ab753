"""Which transport NCCL took, from what it prints under NCCL_DEBUG=INFO.

NCCL falls back in silence, from InfiniBand to sockets, or from GPUDirect to host memory: messages then take many
times as long, and no check fails. Tested on lines as NCCL 2.18 to 2.28 print them, not on a cluster.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = re.compile(r"NCCL INFO (?:.*: )?Using network (.+?)\s*$", re.MULTILINE)
DEVICES = re.compile(r"NCCL INFO NET/\S+ *: Using (.+?)(?:; *OOB.*)?\s*$", re.MULTILINE)
DEVICE = re.compile(r"\[\d+\]\s*([\w.:/-]+)")
CHANNEL = re.compile(r"NCCL INFO Channel \S+ *: .* via ([\w/]+)")
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Transport:
    """What one rank's NCCL took.

    network: its word for the network between nodes, or "". devices: of that network. via: how many channels go by
    what: P2P, SHM, NET/IB, NET/IB/GDRDMA, NET/Socket. idle: the node's InfiniBand devices while it takes sockets.
    """

    network: str = ""
    devices: tuple[str, ...] = ()
    via: Mapping[str, int] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        channels = ", ".join(f"{count} by {name}" for name, count in sorted(self.via.items()))
        devices = f" ({', '.join(self.devices)})" if self.devices else ""
        return f"{self.network or 'no network'}{devices}; channels: {channels or 'none'}"


def ask_nccl(environ: MutableMapping[str, str]) -> Path | None:
    """Have NCCL write what it takes into a file, and return that. None: the user has asked it something else."""
    if {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & environ.keys():
        return None
    file = Path(tempfile.mkdtemp(prefix="megazero-nccl-")) / "log"
    environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}
    return file


def read_transport(log: str, infiniband: Sequence[str] = ()) -> Transport:
    """Return what a rank's lines say. infiniband: the node's devices."""
    network = next(iter(reversed(NETWORK.findall(log))), "")
    found = next(iter(reversed(DEVICES.findall(log))), "")
    devices = tuple(dict.fromkeys(name.rstrip(":") for name in DEVICE.findall(found)))
    via = Counter(_kind(each) for each in CHANNEL.findall(log))
    return Transport(network, devices, dict(via), tuple(infiniband) if network == "Socket" else ())


def transport_of(file: Path) -> Transport | None:
    """Return what this rank's NCCL wrote, or None if it wrote nothing: no NCCL, or one rank."""
    try:
        log = file.read_text("utf-8", "replace")
    except OSError:
        return None
    held = sorted(path.name for path in INFINIBAND.glob("*")) if INFINIBAND.is_dir() else []
    return read_transport(log, held)


def transport_notes(every: Sequence[tuple[str, Transport | None]]) -> Iterator[str]:
    """Yield a line for each transport that ranks took. every: node and transport of each rank."""
    known = [(node, each) for node, each in every if each is not None]
    groups: dict[str, list[str]] = {}
    for node, each in known:
        groups.setdefault(each.words, []).append(node)
    for words, nodes in groups.items():
        where = f" on {', '.join(dict.fromkeys(nodes))}" if len(groups) > 1 else ""
        yield f"NCCL's transport{where}: {words}"
    idle = {node: each.idle for node, each in known if each.idle}
    for node, names in idle.items():
        yield (
            f"slow: NCCL takes sockets on {node}, which has InfiniBand ({', '.join(names)}): look at NCCL_IB_HCA, "
            "NCCL_IB_DISABLE, NCCL_NET and whether the container has libibverbs and /dev/infiniband"
        )


def _kind(via: str) -> str:
    """Return a channel's way without the device's number: NET/IB/0/GDRDMA is NET/IB/GDRDMA."""
    kind, *more = [part for part in via.split("/") if not part.isdigit()]
    return "/".join([kind, *more]) if kind == "NET" else kind
