"""kvxfer bench with caches in GPU memory, over runtimes that stand for CUDA and HIP."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kvtest import fake_gpu
from kvtest.bench import records

from kvxfer import ResourceError, _core
from kvxfer._gpu_memory import open_gpu

LIBRARIES = {"cuda": "KVXFER_CUDA_LIBRARY", "hip": "KVXFER_HIP_LIBRARY"}


@pytest.fixture(params=sorted(LIBRARIES))
def runtime(request, tmp_path, monkeypatch):
    if _core.build_info()["sanitize"]:
        pytest.skip("ASan does not follow fibers between libraries; the C++ tests of GPUs run")
    with fake_gpu.runtimes(tmp_path, monkeypatch):
        library = os.environ["KVXFER_HSA_LIBRARY"]
        for kind, variable in LIBRARIES.items():
            monkeypatch.setenv(variable, library if kind == request.param else "libnone.so")
        yield request.param


def test_transfers_between_gpus_are_checked(runtime):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvxfer", "bench", "local", "--memory", "gpu", "--json"),
            *("--block", "256", "--blocks", "5", "--transport", "shm", "--no-rivals"),
            *("--seconds", "0.01", "--within", "0.1"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (result,) = records(done.stdout)
    assert result["case"]["memory"] == "gpu"
    assert result["verified"] == "exact"
    assert result["report"]["path"] == "gpu-ipc"


def test_without_a_gpu_it_says_what_each_runtime_says(monkeypatch):
    for variable in LIBRARIES.values():
        monkeypatch.setenv(variable, "libnone.so")
    with pytest.raises(ResourceError, match=r"CUDA: libnone.so: .*; HIP: libnone.so: "):
        open_gpu()
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", "libc.so.6")
    with pytest.raises(ResourceError, match="CUDA: libc.so.6 has no cuInit"):
        open_gpu()
