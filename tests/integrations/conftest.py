"""Tests of integrations need the engine that they integrate with, and are skipped without it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDS_VLLM = "vLLM is not installed here; `make test-vllm` installs it into .venv-vllm"


@pytest.fixture(scope="session")
def fake() -> Any:
    """The module rig.fake."""
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from rig import fake

    return fake


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from rig.model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine(fake: Any, model: Path) -> Iterator[Callable[..., Any]]:
    """Makes engines, as ``engine("kv_producer", block_size=64)``; closed at the end."""
    made = []

    def make(role: str, **options: Any) -> Any:
        made.append(fake.Engine(options.pop("model", model), role, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What the connector logs; vLLM's loggers don't propagate, so caplog sees nothing."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    loggers = [
        logging.getLogger(f"vllm.kvxfer.integrations.vllm_connector.{name}")
        for name in ("scheduler", "worker", "connector")
    ]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)
