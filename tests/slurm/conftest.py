"""The fixture ``slurm``: a real cluster of eight nodes. Without one the test is skipped and says what to install."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netlab.lab import LabUnavailable
from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("slurm")
    try:
        cluster = Cluster(folder, nodes=8, disks=4).__enter__()
    except LabUnavailable as error:
        pytest.skip(f"no SLURM: {error}")
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def idle(slurm: Cluster) -> Iterator[None]:
    """No job is left to the next test, whose nodes are then the first ones."""
    yield
    slurm.empty()
