"""Describes a cluster: its devices, its links, and what was measured on it. Reads cluster files.

A cluster file is YAML, written by hand or by ``megazero calibrate``. Rates are those of one direction. All faults of
a file are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, make_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from megazero.bounded import MOST_YAML, load_yaml, read_bytes
from megazero.config.errors import ConfigError
from megazero.config.nearest import did_you_mean, multiples_around
from megazero.config.options.fields import convert, fault, option, section_options
from megazero.mesh.levels import BETWEEN, CLUSTER, INTER, INTRA, NODE, Level, links_of
from megazero.products import FP8_PRODUCTS, PRODUCTS

CLUSTERS = Path(__file__).parent / "clusters"
OPERATIONS = ("gather", "exchange", "sum", "message")  # all-gather, all-to-all, all-reduce, point to point
MODULES = ("embedding", "layer", "head")
DATA_SHEET, PUBLISHED, CALIBRATED = "data sheet", "published", "calibrated"  # where rates come from
MOST = 1 << 17  # nodes, or ranks of one: a slip of some digits is not to begin a search without an end
LEAST = 1e-6  # of a rate, or of a share of one: by less a step takes no number of seconds that JSON has
Section = TypeVar("Section")
needed = partial(option, MISSING, required=True)

_RATES = {name: option(None, f"peak rate of matrix products in {name}", low=LEAST) for name in PRODUCTS}
Rates: Any = make_dataclass(
    "Rates",
    [(f"{name}_tflops", "float | None", rate) for name, rate in _RATES.items()],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True)
class Device(Rates):
    """One accelerator, which one rank has for itself.

    matmul_efficiency: the share of the peak that large matrix products reach in a long run. product_us: what each
    product takes beside, whatever its size. attention_efficiency: the same share of attention's products with many
    keys; with attention_half_keys of them it reaches half. memory_efficiency: the share of the memory's rate that
    what is no product reaches, operation by operation. contention: the share of a message's time that computing
    loses while it is on its way. reserved_gib: what the driver and the communication library take of the memory.
    """

    name: str = needed("what it is called")
    memory_gib: float = needed("memory of a rank, in GiB", above=0)
    memory_gbytes_per_s: float = needed("rate of that memory, in GB/s", low=LEAST)
    matmul_efficiency: float = needed("share of the peak that matrices reach", low=LEAST, high=1)
    product_us: float = option(0.0, "time of a product beside its operations, in microseconds", low=0)
    attention_efficiency: float | None = option(
        None, "share of the peak that attention reaches (default: matmul_efficiency)", low=LEAST, high=1
    )
    attention_half_keys: float = option(0.0, "keys of a query at which attention reaches half of that", low=0)
    memory_efficiency: float = option(1.0, "share of memory's rate that operations reach", low=LEAST, high=1)
    contention: float = option(0.0, "of messages' time, what computing beside them loses", low=0, high=1)
    reserved_gib: float = option(1.5, "memory that is not for tensors, in GiB", low=0)
    codec_gbytes_per_s: float | None = option(None, "bytes that codecs read and write, in GB/s", low=LEAST)
    update_gbytes_per_s: float | None = option(
        None, "bytes that the norm and the optimizer read and write, in GB/s", low=LEAST
    )

    @property
    def room(self) -> float:
        """Return the bytes of memory that tensors may take."""
        return (self.memory_gib - self.reserved_gib) * 2**30

    @property
    def peaks(self) -> dict[str, float]:
        """Return the known peaks of PRODUCTS, in operations per second."""
        rates = {name: getattr(self, f"{name}_tflops") for name in PRODUCTS}
        return {name: rate * 1e12 for name, rate in rates.items() if rate is not None}

    def peak(self, product: str) -> float:
        """Return the peak in operations per second. Raises ValueError if the file says none for the product."""
        if product not in self.peaks:
            dtypes = " or ".join(f"--{name}" for name in self.peaks if name not in FP8_PRODUCTS)
            said = "fp8-recipe" if product in FP8_PRODUCTS else "params-dtype"
            raise ValueError(
                f"--{said} {product.removeprefix('fp8_')}: the cluster file says no rate of {self.name} in it "
                f"(device.{product}_tflops); nearest: {dtypes or 'add one'}"
            )
        return self.peaks[product]


@dataclass(frozen=True)
class IntraNode:
    """The link of a rank to the others of its node."""

    gbytes_per_s: float = needed("rate of a rank, in GB/s", low=LEAST)
    latency_us: float = option(5.0, "time of a step of a collective, in microseconds", low=0)


@dataclass(frozen=True)
class InterNode:
    """The link of a node to the others: all its adapters together.

    efficiency: the share of the line rate that collectives reach, where none was measured. exchange_share: the share
    of that which all-to-alls reach, where many pairs of ranks meet on one adapter.
    """

    gbits_per_s: float = needed("rate of a node, in Gb/s", low=LEAST)
    rank_gbits_per_s: float | None = option(None, "most that a rank reaches (default: the node's)", low=LEAST)
    latency_us: float = option(10.0, "time of a step of a collective, in microseconds", low=0)
    efficiency: float = option(0.8, "share of the line rate that collectives reach", low=LEAST, high=1)
    exchange_share: float = option(1.0, "share of that which all-to-alls reach", low=LEAST, high=1)


@dataclass(frozen=True)
class InterLevel:
    """The link of a rack, or of a site, to the others: that of all its nodes together.

    It is some consecutive nodes. Inside it the level below joins them, in the end ``InterNode``.
    """

    gbits_per_s: float = needed("rate of a rack, or of a site, in Gb/s", low=LEAST)
    parts: int = option(
        2, "racks or sites of the nodes, in order", low=2, aliases=tuple(f"{name}s" for name in BETWEEN)
    )
    latency_us: float = option(10.0, "time of a step of a collective, in microseconds", low=0)
    efficiency: float = option(0.8, "share of the line rate that collectives reach", low=LEAST, high=1)


@dataclass(frozen=True)
class Cores:
    """The processors that ranks of one host share.

    A cluster whose ranks have an accelerator each has none: their hosts are not what a step waits for.
    """

    count: int = needed("processors of a host", low=1)
    ranks: int = needed("consecutive ranks that share them", low=1)

    @property
    def crowd(self) -> float:
        """How many ranks share a processor."""
        return max(1.0, self.ranks / self.count)


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective over ``ranks`` on ``nodes`` nodes; a rank sends ``bytes``. All such groups ran at once.

    busy: seconds of a processor that one rank's part takes, of which compute is robbed where ranks share cores.
    spread: (slowest - fastest) / median of the rounds, of which ``seconds`` is the median.
    """

    operation: str = needed("what it does", choices=OPERATIONS)
    ranks: int = needed("ranks of a group", low=2)
    nodes: int = needed("nodes that a group lies on", low=1)
    bytes: int = needed("bytes that a rank sends", low=1)
    seconds: float = needed("time", above=0)
    busy: float = option(0.0, "seconds of a processor", low=0)
    spread: float | None = option(None, "of the rounds, relative", low=0)


@dataclass(frozen=True)
class MeasuredLayer:
    """One module's times for a micro-batch whose forward has ``forward_flops`` operations on a rank.

    forward_bytes: what it moves beside its matrices, by compute.py's count; 0: not known. tp: how many ranks share
    it; their collectives are part of the times. All ranks of a node were at work.
    """

    forward_flops: float = needed("operations of its forward on a rank", above=0)
    forward_seconds: float = needed("time of its forward", above=0)
    backward_seconds: float = needed("time of its backward, without recompute", above=0)
    module: str = option("layer", "which module", choices=MODULES)
    tp: int = option(1, "tensor-parallel ranks", low=1)
    micro_batch: int | None = option(None, "samples of the micro-batch", low=1)
    forward_bytes: float = option(0.0, "bytes that its forward moves", low=0)
    spread: float | None = option(None, "of the rounds, relative", low=0)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal ranks, with what was measured on them (empty where nothing was).

    above: the levels between node and cluster by the link between them ('inter_rack'), the lowest first. between: the
    link to other clusters like this, where it is a ``part``.
    """

    name: str
    nodes: int
    ranks_per_node: int
    device: Device
    intra_node: IntraNode
    inter_node: InterNode
    collectives: tuple[MeasuredCollective, ...] = ()
    layers: tuple[MeasuredLayer, ...] = ()
    cores: Cores | None = None
    above: Mapping[str, InterLevel] = field(default_factory=dict, hash=False)
    rates: str = DATA_SHEET
    between: InterNode | InterLevel | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if nodes do not divide into the racks, or these into the sites."""
        whole, of = self.nodes, "nodes"
        for link, level in self.above.items():
            parts, near = link.replace("inter_", "") + "s", multiples_around(whole, level.parts)
            if whole % level.parts:
                said = f"{whole} {of} do not divide into {level.parts} {parts}; nearest: {near} {of}"
                raise ConfigError([f"cluster {self.name}: {said}"])
            whole, of = level.parts, parts

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Return node, ..., cluster, with the links between their parts."""
        names = (NODE, *(link.removeprefix("inter_") for link in self.above), CLUSTER)
        sizes = (self.ranks_per_node, *(self.world_size // level.parts for level in self.above.values()))
        return tuple(map(Level, names, (*sizes, self.world_size), (INTRA, INTER, *self.above)))

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Return these levels as --level-sizes has them."""
        return tuple(level.size // self.ranks_per_node for level in self.levels[1:-1])

    @property
    def slow_part(self) -> str:
        """Return what the slowest kind of link joins: 'node', 'rack' or 'site'."""
        return self.levels[-2].name

    @property
    def slow_link(self) -> InterNode | InterLevel:
        """Return the slowest kind of link that there is: that between the parts of the highest level."""
        return self.above.get(self.levels[-1].link, self.inter_node)

    def part(self, count: int) -> Cluster:
        """Return one of so many equal parts, which its slowest kind of link joins."""
        above = {
            link: replace(level, parts=level.parts // count)
            for link, level in self.above.items()
            if level.parts % count == 0 and level.parts > count
        }
        return replace(self, nodes=self.nodes // count, above=above, between=self.slow_link)

    def met_seconds(self, received: float) -> float:
        """Return the seconds in which every rank gets so many bytes from clusters like this."""
        link = self.between or self.slow_link
        ranks = self.ranks_per_node if isinstance(link, InterNode) else self.world_size
        return 2e-6 * link.latency_us + received * ranks * 8e-9 / (link.gbits_per_s * link.efficiency)

    def with_slow_link(self, gbits_per_s: float, delay_ms: float) -> Cluster:
        """Return it with another rate of that link, so much more latency, and nothing measured over it."""
        latency = self.slow_link.latency_us + 1e3 * delay_ms
        changed: Any = replace(self.slow_link, gbits_per_s=gbits_per_s, latency_us=latency)
        if self.above:
            return replace(self, above={**self.above, self.levels[-1].link: changed})
        inside = tuple(row for row in self.collectives if row.nodes == 1)
        return replace(self, inter_node=changed, collectives=inside)

    @property
    def on_host(self) -> bool:
        """Whether the ranks compute on their hosts' processors, in their hosts' memory."""
        return self.cores is not None

    def with_nodes(self, nodes: int) -> Cluster:
        return replace(self, nodes=nodes)

    def with_room(self, room: float) -> Cluster:
        """Return it with devices on which tensors may take at most ``room`` bytes."""
        least = min(room, self.device.room) / 2**30
        return replace(self, device=replace(self.device, memory_gib=least, reserved_gib=0.0))


@dataclass(frozen=True)
class _Top:
    """The keys of a cluster file that hold one value."""

    name: str = needed("what the cluster is called")
    nodes: int = needed("how many nodes", low=1, high=MOST)
    ranks_per_node: int = needed("how many ranks a node has", low=1, high=MOST)
    source: str = option("", "where its figures come from")
    rates: str = option(DATA_SHEET, "source of device rates", choices=(DATA_SHEET, PUBLISHED, CALIBRATED))


_PARTS: Mapping[str, type] = {"device": Device, "intra_node": IntraNode, "inter_node": InterNode}
_ABOVE = links_of(len(BETWEEN))[2:]  # inter_rack, ...
_OPTIONAL: Mapping[str, type] = {"cores": Cores, **dict.fromkeys(_ABOVE, InterLevel)}
TABLES: Mapping[str, type] = {"collectives": MeasuredCollective, "layers": MeasuredLayer}


def known_clusters() -> tuple[str, ...]:
    """Return the names of the clusters that come with the package."""
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))


def load_cluster(name: str) -> Cluster:
    """Read a cluster by the path of its file, or by the name of one that comes with the package.

    Raises ConfigError with every fault.
    """
    path = CLUSTERS / f"{name}.yaml" if name in known_clusters() else Path(name)
    try:
        text = read_bytes(path, MOST_YAML).decode("utf-8")
    except (OSError, ValueError) as error:
        near = did_you_mean(name, known_clusters())
        raise ConfigError(
            [
                f"--cluster {name} is neither a file that can be read ({getattr(error, 'strerror', None) or error}) "
                f"nor one of {', '.join(known_clusters())}{near}"
            ]
        ) from None
    return parse_cluster(text, str(path))


def cluster_of_run(name: str, world_size: int, ranks_per_node: int) -> Cluster:
    """Return the cluster of that name or file, with as many nodes as a run of ``world_size`` ranks has.

    Raises ConfigError if the file is wrong, or describes other nodes than ranks_per_node ranks each (fewer may be on
    a single node).
    """
    cluster, nodes = load_cluster(name), -(-world_size // ranks_per_node)
    if ranks_per_node != cluster.ranks_per_node and not (
        nodes == 1 and ranks_per_node < cluster.ranks_per_node
    ):
        raise ConfigError(
            [
                f"--cluster {name} has nodes of {cluster.ranks_per_node} ranks, but this run has {ranks_per_node} on "
                f"each of {nodes}: start {cluster.ranks_per_node} ranks per node, or describe these nodes in a file"
            ]
        )
    return replace(cluster, nodes=nodes, ranks_per_node=ranks_per_node)


def parse_cluster(text: str, where: str) -> Cluster:
    """Return the cluster that a YAML text describes. Raises ConfigError with every fault; ``where`` begins each."""
    try:
        content, twice = load_yaml(text)
    except ValueError as error:
        raise ConfigError([f"{where} is not YAML: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError(
            [f"{where} holds {type(content).__name__}, not a mapping with name, nodes, device, ..."]
        )
    errors = [f"{where}: {key} stands there twice" for key in twice]
    named = {*_PARTS, *_OPTIONAL, *TABLES}
    keys = [*(o.name for o in section_options("", _Top)), *named]
    errors += [
        f"{where}: {key} does not exist{did_you_mean(str(key), keys)}" for key in content if key not in keys
    ]
    top = _read(_Top, {k: v for k, v in content.items() if k not in named and k in keys}, where, errors)
    there = {**_PARTS, **{key: cls for key, cls in _OPTIONAL.items() if content.get(key) is not None}}
    parts = {key: _read(cls, content.get(key), f"{where}: {key}", errors) for key, cls in there.items()}
    tables = {
        key: tuple(_rows(cls, content.get(key), f"{where}: {key}", errors)) for key, cls in TABLES.items()
    }
    if top and parts["device"]:
        device = parts["device"]
        if not device.peaks:
            rates = ", ".join(f"{name}_tflops" for name in PRODUCTS)
            errors.append(f"{where}: device needs at least one of {rates}")
        if device.reserved_gib >= device.memory_gib:
            errors.append(
                f"{where}: device.reserved_gib {device.reserved_gib:g} leaves nothing of memory_gib "
                f"{device.memory_gib:g}; the default is 1.5"
            )
    if errors:
        raise ConfigError(errors)
    above = {link: parts.pop(link) for link in _ABOVE if link in parts}
    pieces: dict[str, Any] = {**parts, **tables, "above": above}
    return Cluster(top.name, top.nodes, top.ranks_per_node, **pieces, rates=top.rates)


def _rows(cls: type, rows: Any, where: str, errors: list[str]) -> Iterator[Any]:
    if rows is not None and not isinstance(rows, list):
        errors.append(f"{where} holds {type(rows).__name__}, not a list of measurements")
        return
    for number, row in enumerate(rows or (), 1):
        yield _read(cls, row, f"{where}, row {number}", errors)


def _read(cls: type[Section], values: Any, where: str, errors: list[str]) -> Any:
    """Return the section that ``values`` describe, or None if they have faults, which go to ``errors``."""
    if values is not None and not isinstance(values, dict):
        errors.append(f"{where} holds {type(values).__name__}, not a mapping of names to values")
        return None
    known = {o.name: o for o in section_options(cls.__name__, cls)}
    known_as = {alias: o.name for o in known.values() for alias in (o.name, *o.aliases)}
    before, read = len(errors), dict[str, Any]()
    for said, raw in (values or {}).items():
        key = known_as.get(said, said)
        if key not in known:
            errors.append(f"{where}: {key} does not exist{did_you_mean(str(key), known)}")
            continue
        try:
            read[key] = None if raw is None else convert(known[key], raw)
        except ValueError as error:
            errors.append(f"{where}: {key} {error}")
            read[key] = known[key].default
            known.pop(key)
    for name, opt in known.items():
        if text := fault(opt, read.get(name, opt.default)):
            errors.append(f"{where}: {text.removeprefix('--').replace(opt.key, name, 1)}")
    if len(errors) > before:
        return None
    return cls(**{name: value for name, value in read.items() if value is not None})
