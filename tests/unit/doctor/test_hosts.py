"""What the doctor says of hosts that we don't have."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from kvtest.doctor_hosts import GIB, Host, h100, mi300x, one, switched, validate

from kvxfer.doctor import nic_checks, nics
from kvxfer.doctor.examine import examine
from kvxfer.doctor.findings import State
from kvxfer.doctor.report import summary
from kvxfer.doctor.tree import Recorded, open_tree

LOW = {"memlock": "8388608"}


def hurting(examination) -> list[str]:
    return sorted({finding.id for finding in examination.findings if finding.hurts})


@pytest.mark.parametrize("host", [mi300x, h100])
def test_nothing_hurts_on_a_host_that_is_set_up(host, look):
    found = look(host(8)[0])
    assert hurting(found) == []
    assert found.status == 0
    assert summary(found.findings).startswith("Nothing would hurt")
    assert found.affinity is not None
    assert [gpu.address for gpu in found.affinity.gpus] == sorted(
        gpu.address for gpu in found.affinity.gpus
    )
    for index in range(8):
        assert found.affinity.levels[index][index] == "PIX"
        assert [nic.name[-1] for nic in found.affinity.nearest(index)] == [str(index)]
    rows = found.affinity.levels
    assert rows[0][1] == "PHB"
    assert rows[0][7] == "SYS"


def test_an_empty_host_has_nothing_that_hurts(tmp_path):
    found = examine(open_tree(str(tmp_path)), self_test=True)
    assert hurting(found) == []
    assert found.status == 0
    validate(found.record())
    assert one(found, "nic.none").state is State.INFO
    assert one(found, "gpu.none").state is State.INFO


def test_two_switches_in_a_row_are_one_tree(look):
    host = Host()
    up, first, second = switched(0, 0)
    host.bridge(up.rpartition("/")[0], acs=None)
    for path in (up, first, second):
        host.bridge(path)
    below = f"{second}/0000:10:00.0/0000:11:00.0"
    host.bridge(below.rpartition("/")[0])
    host.bridge(below)
    host.gpu(f"{first}/0000:05:00.0", "NVIDIA", "H100", 80 * GIB)
    host.nic(f"{below}/0000:12:00.0", "mlx5_0")
    assert look(host).affinity.levels == (("PXB",),)


def test_no_shared_receive_queue(look):
    host, _, folders = mi300x(
        8, driver="ionic", max_srq=0, max_qp_wr=64, max_mr_size=1 << 28, firmware="1.117"
    )
    host.limits(**LOW)
    found = look(host)
    queues = [finding for finding in found.findings if finding.id == "nic.no_srq"]
    assert len(queues) == len(folders) == 8
    assert "UCX" in queues[0].why
    assert "nic.queue_depth" in {finding.id for finding in found.findings}
    assert "nic.registration" in {finding.id for finding in found.findings}
    assert "max_srq 0" in next(f for f in found.findings if f.id == "nic.port").found


@pytest.mark.parametrize(("works", "state"), [(True, State.INFO), (False, State.WARN)])
def test_no_srq_hurts_only_where_ucx_would_have_to_do(works, state, tmp_path):
    host = Host()
    host.nic("pci0000:00/0000:01:00.0", "ionic_0", max_srq=0)
    tree = open_tree(str(host.write(tmp_path)))
    found = nics.find_nics(tree, host.answers)
    said = nic_checks.check_nics(tree, found, host.answers, works)
    assert [finding.state for finding in said if finding.id == "nic.no_srq"] == [state]


@pytest.mark.parametrize(
    ("state", "physical", "remedy"),
    [
        ("1: DOWN", "2: Polling", "cable"),
        ("1: DOWN", "3: Disabled", "ip link set eth3 up"),
        ("2: INIT", "5: LinkUp", "opensm"),
        ("1: DOWN", "4: Training", "Training"),
    ],
)
def test_a_port_that_is_down(state, physical, remedy, look):
    host, _, folders = h100(interface="eth3")
    host.port("mlx5_3", folders[3], state=state, physical=physical)
    found = look(host)
    finding = one(found, "nic.port_down")
    assert finding.what == "mlx5_3 port 1"
    assert finding.state is State.WARN
    assert remedy in finding.fix
    assert hurting(found) == ["nic.port_down"]
    assert found.status == 1
    assert "mlx5_3 port 1" in summary(found.findings)


def test_all_ports_down(look):
    host, _, folders = h100()
    for index, folder in enumerate(folders):
        host.port(f"mlx5_{index}", folder, state="1: DOWN", physical="2: Polling")
    found = look(host)
    assert one(found, "nic.none_active").state is State.BAD
    assert {f.state for f in found.findings if f.id == "nic.port_down"} == {State.BAD}


def test_iommu_on(look):
    host, gpus, folders = mi300x(8)
    for index, folder in enumerate([*gpus, *folders]):
        host.iommu(folder, index, "DMA-FQ")
    finding = one(look(host), "gpudirect.iommu")
    assert finding.state is State.WARN
    assert "and 13 more" in finding.found
    assert "iommu=pt" in finding.fix


def test_iommu_in_passthrough(look):
    host, gpus, folders = mi300x()
    for index, folder in enumerate([*gpus, *folders]):
        host.iommu(folder, index, "identity")
    finding = one(look(host), "gpudirect.iommu")
    assert (finding.state, finding.found) == (State.OK, "passes through")


@pytest.mark.parametrize("control", [0x04, 0x08, 0x10, 0x1D])
def test_acs_on(control, look):
    finding = one(look(mi300x(acs=control)[0]), "gpudirect.acs")
    assert finding.state is State.WARN
    assert "setpci -s 0000:02:00.0 ECAP_ACS+6.w=0" in finding.fix


def test_acs_that_redirects_nothing(look):
    assert one(look(mi300x(acs=0x01)[0]), "gpudirect.acs").state is State.OK


def test_acs_of_bridges_above_the_switch_does_not_matter(look):
    host, _, _ = h100()
    up, _, _ = switched(0, 0)
    host.bridge(up.rpartition("/")[0], acs=0x1D)  # the root port, which peer traffic never meets
    assert one(look(host), "gpudirect.acs").state is State.OK


def test_acs_that_only_root_can_read(look):
    host, _, _ = h100()
    for path in switched(0, 0)[1:]:
        host.bridge(path, readable=False)
    finding = one(look(host), "gpudirect.acs")
    assert finding.state is State.INFO
    assert "sudo" in finding.fix


def test_acs_lists_that_go_in_circles(look):
    host, _, _ = h100()
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    for path in switched(0, 0)[1:]:
        host.device(path, 0x1000, 0x0604, config=bytes(config))
    assert one(look(host), "gpudirect.acs").state is State.OK


@pytest.mark.parametrize(
    ("memlock", "state"),
    [("8388608", State.BAD), (str(1 << 32), State.WARN), ("unlimited", State.OK)],
)
def test_little_memory_may_be_locked(memlock, state, look):
    host, _, _ = h100()
    host.limits(memlock=memlock)
    finding = one(look(host), "host.memlock")
    assert finding.state is state
    assert state is State.OK or "ulimit -l unlimited" in finding.fix


def test_locked_memory_is_of_no_matter_to_root_and_without_rdma(look):
    host, _, _ = h100()
    host.limits(**LOW)
    host.files["/proc/self/status"] = "CapEff:\t000001ffffffffff\n"
    assert one(look(host), "host.memlock").state is State.OK
    host = Host()
    host.limits(**LOW)
    assert one(look(host), "host.memlock").state is State.OK


def test_numa_balancing(look):
    host, _, _ = mi300x()
    host.numa_balancing(1)
    finding = one(look(host), "host.numa_balancing")
    assert finding.state is State.WARN
    assert "kernel.numa_balancing=0" in finding.fix
    laptop = Host(nodes=1)
    laptop.numa_balancing(1)
    assert one(look(laptop), "host.numa_balancing").state is State.INFO


@pytest.mark.parametrize(
    ("quota", "state"),
    [
        ("150000 100000\n", State.WARN),
        ("400000 100000\n", State.INFO),
        ("max 100000\n", None),
        ("400000 0\n", None),
        ("0\r:", None),
        ("-1 2", None),
    ],
)
def test_a_quota_of_processors(quota, state, look):
    host, _, _ = mi300x()
    host.files["/sys/fs/cgroup/cpu.max"] = quota
    found = look(host)
    told = [finding.state for finding in found.findings if finding.id == "host.cpu_quota"]
    assert told == ([] if state is None else [state])


def test_no_way_into_gpu_memory(look):
    host, _, _ = mi300x()
    host.kernel_options("CONFIG_PCI_P2PDMA")
    found = look(host)
    assert hurting(found) == ["gpudirect.dmabuf", "gpudirect.peermem"]
    assert "lacks CONFIG_DMABUF_MOVE_NOTIFY" in one(found, "gpudirect.dmabuf").found


@pytest.mark.parametrize("way", ["dmabuf", "peermem"])
def test_one_way_is_enough(way, look):
    host, _, _ = mi300x()
    if way == "peermem":
        host.kernel_options()
        host.files["/sys/kernel/mm/memory_peers/amdkfd/version"] = "1.0\n"
    found = look(host)
    assert hurting(found) == []
    assert one(found, f"gpudirect.{way}").state is State.OK


def test_an_old_rdma_core_and_a_closed_driver_have_no_dmabuf(look):
    host, _, _ = h100()
    host.answers["verbs"]["dmabuf"] = False
    host.answers["cuda"]["devices"][0]["dmabuf"] = False
    found = one(look(host), "gpudirect.dmabuf").found
    assert "ibv_reg_dmabuf_mr" in found
    assert "does not export dmabufs" in found


def test_a_small_window(look):
    host, _, _ = mi300x()
    up, first, _ = switched(0, 0)
    host.gpu(f"{first}/0000:03:00.0", "AMD", "AMD Instinct MI300X", 192 * GIB, 256 << 20)
    finding = one(look(host), "gpu.small_bar")
    assert "256 MiB" in finding.found
    assert "Above 4G" in finding.fix
    assert up


def test_lanes_and_speed(look):
    host, gpus, folders = h100()
    host.link(gpus[0], lanes=8)
    host.link(folders[0], lanes=8)
    host.link(folders[1], speed=16.0)
    found = look(host)
    assert "x8, of x16" in one(found, "gpu.pcie").found
    slow = [finding.what for finding in found.findings if finding.id == "nic.pcie"]
    assert slow == ["mlx5_0", "mlx5_1"]


def test_a_speed_that_gpus_idle_at_is_no_fault(look):
    host, gpus, _ = h100()
    host.link(gpus[0], speed=2.5)
    assert hurting(look(host)) == []


def test_mtu_and_addresses_of_roce(look):
    host, _, _ = mi300x(mtu=1500, gids=(("RoCE v2", "fe80:0000:0000:0000::1"),))
    found = look(host)
    assert hurting(found) == ["nic.gid", "nic.mtu"]
    finding = next(finding for finding in found.findings if finding.id == "nic.mtu")
    assert "ip link set eth0 mtu 9000" in finding.fix


def test_rails_that_are_not_alike(look):
    host, _, folders = h100()
    host.port("mlx5_2", folders[2], rate="200 Gb/sec (4X HDR)")
    host.files[f"{folders[3]}/infiniband/mlx5_3/fw_ver"] = "28.36.1010\n"
    found = look(host)
    assert hurting(found) == ["nic.firmware", "nic.slow"]
    assert one(found, "nic.slow").what == "mlx5_2"
    assert "28.36.1010: mlx5_3" in one(found, "nic.firmware").found


def test_a_gpu_far_from_all_adapters(look):
    host = Host()
    host.gpu("pci0000:80/0000:81:00.0", "NVIDIA", "H100", 80 * GIB)
    host.nic("pci0000:00/0000:01:00.0", "mlx5_0")
    host.files["/sys/module/nvidia_peermem/refcnt"] = "1\n"
    found = look(host)
    assert hurting(found) == ["affinity.far"]
    assert found.affinity.levels == (("SYS",),)


def test_a_gpu_that_sysfs_does_not_show(look):
    """As in a container: its driver knows it, and nobody can tell what is near to it."""
    host, gpus, _ = h100()
    address = gpus[0].rpartition("/")[2]
    del host.links[f"/sys/bus/pci/devices/{address}"]
    found = look(host)
    assert hurting(found) == ["affinity.hidden"]
    assert one(found, "affinity.hidden").what == address


def test_adapters_that_programs_do_not_see(look):
    host, _, _ = h100()
    del host.answers["verbs"]["devices"]["mlx5_1"]
    assert "mlx5_1" in one(look(host), "nic.provider").found


def test_an_adapter_that_cannot_be_opened(look):
    host, _, _ = h100()
    host.answers["verbs"]["devices"]["mlx5_1"] = {"error": "it can't be opened"}
    assert one(look(host), "nic.open").state is State.BAD


@pytest.mark.parametrize("answer", [{"missing": "libibverbs.so.1: not there"}, {"error": "x"}])
def test_adapters_without_libibverbs(answer, look):
    host, _, _ = h100()
    host.answers["verbs"] = answer
    finding = one(look(host), "nic.library")
    assert finding.state is State.BAD
    assert "apt install" in finding.fix


def test_gpus_without_a_driver_or_a_library(look):
    host, gpus, _ = h100()
    del host.links[f"{gpus[0]}/driver"]
    host.answers["cuda"] = {"error": "cuInit returned 999", "devices": []}
    found = look(host)
    assert one(found, "gpu.no_driver").state is State.BAD
    assert "cuInit returned 999" in one(found, "gpu.library").found


def test_an_adapter_without_a_driver(look):
    host = Host()
    host.device("pci0000:00/0000:01:00.0", 0x15B3, 0x0207)
    assert one(look(host), "nic.no_driver").state is State.BAD


def test_soft_roce_is_for_tests(look):
    host = Host()
    folder = "/sys/devices/virtual/infiniband/rxe0"
    host.links["/sys/class/infiniband/rxe0"] = folder
    host.files[f"{folder}/parent"] = "eth0\n"
    for name, value in (
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("rate", "10 Gb/sec (4X SDR)"),
        ("link_layer", "Ethernet"),
    ):
        host.files[f"{folder}/ports/1/{name}"] = f"{value}\n"
    host.answers["verbs"]["devices"]["rxe0"] = {"max_srq": 100}
    host.files["/dev/infiniband/uverbs0"] = ""
    found = look(host)
    finding = one(found, "nic.port")
    assert finding.state is State.INFO
    assert "soft-RoCE over eth0" in finding.found
    assert found.affinity is None
    assert hurting(found) == []


def test_devices_of_another_user(tmp_path):
    host, _, _ = mi300x()
    tree = open_tree(str(host.write(tmp_path)))
    examine(tree, self_test=False)
    for call in tree.calls:
        if call.startswith("usable:"):
            tree.calls[call] = False
    found = examine(Recorded(tree.calls), self_test=False)
    assert hurting(found) == ["gpu.device_file", "nic.device_file"]


def test_a_guest_is_told_what_to_check(look):
    host, _, _ = h100()
    host.files["/proc/cpuinfo"] = "processor : 0\nflags\t\t: fpu hypervisor avx2\n"
    found = look(host)
    assert one(found, "gpudirect.guest").state is State.INFO
    assert found.host["guest"]


@given(st.data())
def test_nothing_that_a_host_says_is_an_error(data):
    """Probes make the best of what they read, whatever that is."""
    calls = dict(_recorded())
    keys = data.draw(st.lists(st.sampled_from(sorted(calls)), min_size=1, max_size=12))
    for key in keys:
        kind = key.partition(":")[0].split()[0]
        if kind == "data":
            calls[key] = data.draw(st.binary(max_size=300)).hex()
        elif kind == "names":
            calls[key] = data.draw(st.lists(st.text(min_size=1, max_size=8), max_size=4))
        elif kind == "lines":
            calls[key] = data.draw(st.none() | st.lists(st.text(max_size=40), max_size=4))
        elif kind == "usable":
            calls[key] = data.draw(st.none() | st.booleans())
        elif kind == "answer":
            calls[key] = data.draw(st.sampled_from([None, {"error": "x"}, {"missing": "y"}]))
        else:
            junk = st.text(max_size=40) | st.integers().map(str) | st.sampled_from(_JUNK)
            calls[key] = data.draw(st.none() | junk)
    found = examine(Recorded(calls), self_test=False)
    assert found.status == int(any(finding.hurts for finding in found.findings))


_JUNK = ["", "/", "0x", "-1", "999999999999", "pci0000:00", "/sys/devices/pci0000:00", "a b c"]


@functools.cache
def _recorded() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        tree = open_tree(str(h100()[0].write(Path(folder))))
        examine(tree, self_test=False)
    return json.loads(json.dumps(tree.calls))
