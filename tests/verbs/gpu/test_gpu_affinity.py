"""Agents use the RDMA ports nearest to the GPUs that hold their caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtest import fake_verbs
from kvtest.agents import consumer, pair, producer, registered
from kvtest.caches import Geometry
from kvtest.direct import ends, needs_fake_adapters
from kvtest.fake_gpu import HOST, Gpus, made
from kvtest.gpu_direct import moved, over_hip
from kvtest.sysfs import CUDA, Sysfs

import kvxfer

pytestmark = needs_fake_adapters

TINY = Geometry(layers=("a",), content=64, num_blocks=2, heads=(0, 1))


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sysfs]:
    """Two processors with a switch each, below which are an adapter and a GPU."""
    monkeypatch.setattr("kvxfer.verbs._SYSFS", str(tmp_path))
    return Sysfs(tmp_path)


def rails(link: str) -> set[str]:
    """Return our ends of the paths of a link."""
    return {ours for ours, _ in ends(link)}


def used(here: int, there: int, **knobs: Any) -> str:
    """Fetch once between devices, and return what the link says."""
    with pair("verbs", path="direct", **knobs) as (prefill, decode):
        report = moved(prefill, decode, here, there, TINY)
        assert report.path == "direct"
    return report.link


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("other", [0, 1, HOST])
def test_the_nearest_to_a_gpu(gpus: Gpus, sysfs: Sysfs, device: int, other: int) -> None:
    near = f"nearest to GPU {CUDA[device]}, on the same PCIe switch"
    link = used(other, device)
    assert near in link
    # A producer without a GPU uses both of its ports.
    theirs = ["fake0", "fake1"] if other == HOST else [f"fake{other}"]
    assert ends(link) == {(f"fake{device}", name) for name in theirs}


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"verbs_near": "any"}, {"fake0", "fake1"}),  # the control
        ({"verbs_near": "numa:1"}, {"fake1"}),
        ({"verbs_near": CUDA[1].upper()}, {"fake1"}),
        ({"verbs_devices": "fake0,fake1"}, {"fake0", "fake1"}),
        ({"verbs_devices": "fake1"}, {"fake1"}),
        ({"verbs_devices": "fake0,fake1", "verbs_near": "gpu"}, {"fake0"}),
        ({"verbs_near": "gpu"}, {"fake0"}),
        ({"verbs_near": " GPU"}, {"fake0"}),
        ({"verbs_near": "Any"}, {"fake0", "fake1"}),
        ({"verbs_near": "", "verbs_devices": " "}, {"fake0"}),  # nothing is said
    ],
)
def test_what_was_said_by_name_comes_first(
    gpus: Gpus, sysfs: Sysfs, knobs: dict[str, str], expected: set[str]
) -> None:
    link = used(0, 0, **knobs)
    assert ends(link) == {(name, name) for name in expected}
    assert (f"nearest to GPU {CUDA[0]}" in link) is (expected == {"fake0"})


def test_caches_of_the_host_use_all(gpus: Gpus, sysfs: Sysfs) -> None:
    link = used(HOST, HOST)
    assert ends(link) == {("fake0", "fake0"), ("fake1", "fake1")}
    assert "nearest" not in link


def test_several_gpus_use_what_is_near_to_any(gpus: Gpus, sysfs: Sysfs) -> None:
    with (
        pair("verbs", path="direct") as (prefill, decode),
        made(TINY, 1) as other,
        registered(decode, other.cache),
    ):
        link = moved(prefill, decode, HOST, 0, TINY).link
    assert rails(link) == {"fake0", "fake1"}
    assert f"nearest to GPU {CUDA[0]}, on the same PCIe switch, and to GPU {CUDA[1]}," in link


def test_connections_keep_the_ports_that_they_were_made_with(gpus: Gpus, sysfs: Sysfs) -> None:
    """What is registered later is for later ones."""
    with (
        consumer("verbs", path="direct") as decode,
        producer("verbs", "first", path="direct") as first,
        producer("verbs", "second", path="direct") as second,
    ):
        assert rails(moved(first, decode, HOST, 0, TINY).link) == {"fake0"}
        assert rails(moved(first, decode, HOST, 1, TINY).link) == {"fake0"}
        assert rails(moved(second, decode, HOST, 1, TINY).link) == {"fake1"}
        assert rails(moved(first, decode, HOST, 0, TINY).link) == {"fake0"}
    assert fake_verbs.objects() == 0


def another_gpu(prefill: kvxfer.Agent, other: kvxfer.Agent) -> None:
    moved(prefill, other, 1, HOST, TINY)


def a_port_that_flaps(prefill: kvxfer.Agent, other: kvxfer.Agent) -> None:
    fake_verbs.set_port("fake0", False)
    moved(prefill, other, 0, HOST, TINY)
    fake_verbs.set_port("fake0", True)


@pytest.mark.parametrize("change", [another_gpu, a_port_that_flaps])
def test_what_is_sent_from_stays_registered_with_ports_in_use(
    gpus: Gpus, sysfs: Sysfs, change: Callable[[kvxfer.Agent, kvxfer.Agent], None]
) -> None:
    """Else each chunk is registered for itself."""
    with (
        producer("verbs", path="staged") as prefill,
        consumer("verbs", "first", path="staged", verbs_near="any") as first,
        consumer("verbs", "second", path="staged", verbs_near="any") as second,
    ):
        moved(prefill, first, 0, HOST, TINY)
        change(prefill, second)
        before = fake_verbs.registrations()
        link = moved(prefill, first, 0, HOST, TINY).link
        assert {theirs for _, theirs in ends(link)} == {"fake0"}
        assert fake_verbs.registrations() == before
    assert fake_verbs.objects() == 0


@pytest.mark.parametrize("at_first", [False, True])
def test_when_the_nearest_ports_are_down_others_have_to_do(
    gpus: Gpus, sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch, at_first: bool
) -> None:
    """Until they are up again."""
    with (
        consumer("verbs", path="direct") as decode,
        producer("verbs", "first", path="direct") as first,
        producer("verbs", "second", path="direct") as second,
        producer("verbs", "third", path="direct") as third,
    ):
        if not at_first:
            assert rails(moved(first, decode, HOST, 0, TINY).link) == {"fake0"}
        fake_verbs.set_port("fake0", False)
        assert rails(moved(second, decode, HOST, 0, TINY).link) == {"fake1"}
        fake_verbs.set_port("fake0", True)
        monkeypatch.setattr("kvxfer.verbs._CHECK_SECONDS", 0.0)
        assert rails(moved(third, decode, HOST, 0, TINY).link) == {"fake0"}
    assert fake_verbs.objects() == 0


def test_a_gpu_that_sysfs_does_not_show(gpus: Gpus, sysfs: Sysfs) -> None:
    """As in containers and virtual machines: then all ports are used, and the link says why."""
    sysfs.hide(CUDA[0])
    link = used(HOST, 0)
    assert rails(link) == {"fake0", "fake1"}
    assert f"does not show the GPU {CUDA[0]}" in link
    assert rails(used(HOST, 1)) == {"fake1"}


def test_a_gpu_of_unknown_address(gpus: Gpus, sysfs: Sysfs) -> None:
    """It is registered all the same."""
    with pair("verbs", path="direct") as (prefill, decode):
        gpus.fail("cuDeviceGetPCIBusId")
        link = moved(prefill, decode, HOST, 0, TINY).link
    assert rails(link) == {"fake0", "fake1"}
    assert "chosen from all ports: the PCI address of a GPU is not known" in link


def test_a_gpu_as_near_to_one_as_to_the_other(gpus: Gpus, sysfs: Sysfs) -> None:
    sysfs.hide(CUDA[1])
    sysfs.add("pci0000:e0/0000:e0:01.0", -1, f"bus/pci/devices/{CUDA[1]}")
    link = used(HOST, 1)
    assert rails(link) == {"fake0", "fake1"}
    assert f"nearest to GPU {CUDA[1]}, not on its NUMA node" in link


_OVER_HIP = """
import sys
from pathlib import Path
import kvxfer.verbs
from kvtest import fake_verbs
from kvtest.agents import LONG, pair
from kvtest.caches import Geometry
from kvtest.direct import ends
from kvtest.fake_gpu import GpuPaged
from kvtest.sysfs import HIP, Sysfs
kvxfer.verbs._SYSFS = sys.argv[1]
Sysfs(Path(sys.argv[1]))
SIDE = Geometry(layers=("a",), content=64, num_blocks=2, heads=(0, 2))
fake_verbs.use()
for device in (0, 1):
    with pair("verbs", path="direct") as (prefill, decode):
        source, target = GpuPaged(SIDE, 0, seed=1), GpuPaged(SIDE, device)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(2), 32)
        fetch = decode.fetch(offer.ticket, target.cache, range(2), timeout=LONG)
        fetch.wait(LONG)
        assert f"verbs, 1 rail nearest to GPU {HIP[device]}, on the same" in fetch.report.link
        assert ends(fetch.report.link) == {(f"fake{device}", "fake0")}
    source.free()
    target.free()
print("HIP")
"""


def test_over_hip(gpus: Gpus, tmp_path: Path) -> None:
    """In a process of its own, for there CUDA is not found."""
    assert "HIP" in over_hip(_OVER_HIP, str(tmp_path))


def test_names_of_nothing(gpus: Gpus, sysfs: Sysfs) -> None:
    with pytest.raises(kvxfer.ConfigError, match="names no place .* may also be gpu.* or any"):
        kvxfer.Config(transport="verbs", verbs_near="gpu0")
    with pytest.raises(kvxfer.ConfigError, match="there is no PCI device 0000:99:00.0"):
        kvxfer.Config(transport="verbs", verbs_near="0000:99:00.0")
