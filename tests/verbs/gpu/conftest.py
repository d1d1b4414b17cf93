"""Adapters and GPUs that are none, but reach each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvtest import fake_gpu, fake_verbs
from kvtest.agents import pair
from kvtest.direct import DIRECT
from kvtest.fake_gpu import Gpus

import kvxfer


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    with fake_gpu.without_leaks(tmp_path_factory.mktemp("gpu")) as found:
        yield found


@pytest.fixture(autouse=True)
def adapters(gpus: Gpus) -> Iterator[None]:
    fake_verbs.use()
    with fake_verbs.no_faults_left():
        yield


@pytest.fixture(scope="module")
def agents(gpus: Gpus) -> Iterator[tuple[kvxfer.Agent, kvxfer.Agent]]:
    fake_verbs.use()
    with pair("verbs", **DIRECT) as both:
        yield both
