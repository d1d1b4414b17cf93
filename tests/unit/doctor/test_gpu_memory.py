"""The self-test of GPU memory, over a runtime that stands for CUDA's driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtest import fake_gpu
from kvtest.fake_gpu import Gpus

from kvxfer import _core
from kvxfer.doctor import selftest
from kvxfer.doctor.findings import State

SOME = 32  # tokens


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    if _core.build_info()["sanitize"]:
        pytest.skip("ASan does not follow fibers between libraries; the C++ tests of GPUs run")
    with fake_gpu.runtimes(tmp_path, monkeypatch) as found:
        yield found


def test_a_pattern_goes_there_and_back(gpus: Gpus) -> None:
    found = selftest.check_gpu_memory(SOME)
    assert (found.id, found.state) == ("selftest.gpu", State.OK)
    assert found.found.startswith("every byte as it should be; 128 KiB packed by it at ")


def test_what_comes_back_is_compared(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(selftest.PatternCache):
        def __init__(self, filled: bool) -> None:
            super().__init__(filled)
            self.clear()

    monkeypatch.setattr(selftest, "PatternCache", Broken)
    found = selftest.check_gpu_memory(SOME)
    assert found.state is State.BAD
    assert "bytes WRONG" in found.found


def test_a_gpu_without_memory_is_told(gpus: Gpus) -> None:
    gpus.fail("cuMemAlloc")
    found = selftest.check_gpu_memory(SOME)
    assert found.state is State.BAD
    assert found.found == "failed: cuMemAlloc_v2 says 2"
