"""What the doctor asks of drivers' libraries, by libraries that answer what we know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvxfer.doctor.ask import ask_all
from kvxfer.doctor.tree import open_tree

ROOT = Path(__file__).parents[3]
SONAMES = (
    "libibverbs.so.1",
    "libcuda.so.1",
    "libamdhip64.so.7",
    "libhsa-runtime64.so.1",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler to make the libraries with")
    folder = tmp_path_factory.mktemp("libraries")
    source = ROOT / "tests" / "data" / "doctor" / "fake_libraries.cc"
    made = folder / "made.so"
    subprocess.run(
        [compiler, "-std=c++20", "-shared", "-fPIC", "-I", ROOT / "csrc", "-o", made, source],
        check=True,
        timeout=100,
    )
    for soname in SONAMES:
        (folder / soname).symlink_to(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(folder))
        patch.delenv("KVXFER_VERBS_LIBRARY", raising=False)
        patch.setattr("kvxfer.doctor.ask.PATIENCE", 60.0)
        return ask_all(open_tree("/"))


def test_verbs(answers):
    assert answers["verbs"] == {
        "library": "libibverbs.so.1",
        "dmabuf": True,
        "devices": {
            "fake_0": {
                "max_mr_size": 1 << 40,
                "max_qp": 11,
                "max_qp_wr": 12,
                "max_sge": 13,
                "max_srq": 14,
                "max_srq_wr": 15,
                "fw_ver": "1.2.3",
                "active_mtu": 4096,
                "max_msg_sz": 1 << 30,
            },
            "fake_1": {"error": "it can't be opened"},
        },
    }


def test_cuda(answers):
    assert answers["cuda"] == {
        "library": "libcuda.so.1",
        "version": 12080,
        "devices": [
            {
                "name": "Fake H100",
                "pci": "0000:0a:00.0",
                "memory": 80 << 30,
                "arch": "sm_90",
                "rdma": False,
                "dmabuf": True,
            }
        ],
    }


def test_hip(answers):
    assert answers["hip"] == {
        "library": "libamdhip64.so.7",
        "version": 70100000,
        "dmabuf": True,
        "devices": [{"name": "Fake MI300X", "pci": "0000:0b:00.0"}],
    }
