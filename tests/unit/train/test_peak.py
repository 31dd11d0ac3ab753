"""The peak that MFU is of: the cluster file's, else by the device's name, else unknown."""

from __future__ import annotations

import pytest
import torch

from megazero.config import make_config
from megazero.config.options.cluster import load_cluster
from megazero.plan.report import size_unit
from megazero.train.peak import PEAKS, peak_tflops
from tests.sizes import SMALL

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def peak(name: str, monkeypatch: pytest.MonkeyPatch, **said: str) -> float | None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    return peak_tflops(make_config({**SMALL, "params_dtype": "bf16", **said}), CUDA)


def test_a_device_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak("NVIDIA H100 80GB HBM3", monkeypatch) == 989 and peak("NVIDIA H100 PCIe", monkeypatch) == 756
    assert peak("NVIDIA GB200", monkeypatch) == 2500 and peak("Another", monkeypatch) is None
    assert peak("NVIDIA H100 80GB HBM3", monkeypatch, params_dtype="fp32") is None
    assert peak_tflops(make_config({**SMALL, "params_dtype": "bf16"}), CPU) is None
    shipped = {"H100": "h100", "A100": "a100", "A800": "a800-amsp"}
    assert all(PEAKS[part] == load_cluster(name).device.peak("bf16") / 1e12 for part, name in shipped.items())
    assert all(first not in later for i, first in enumerate(PEAKS) for later in list(PEAKS)[i + 1 :])


def test_a_cluster_file_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak("Another", monkeypatch, cluster="a100") == 312


@pytest.mark.parametrize(
    "size, unit", [(50 << 30, "GiB"), (2 << 30, "GiB"), (2 << 20, "MiB"), (3000, "KiB"), (5, "B")]
)
def test_sizes_are_told_in_a_unit_in_which_they_are_not_zero(size: int, unit: str) -> None:
    count, name = size_unit(size)
    assert name == unit and float(f"{size / count:.2f}") > 0
