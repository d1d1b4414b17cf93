"""All of it: asks, looks and tests, and puts together what was found."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from kvxfer.doctor.affinity import Affinity, affinity_of, check_affinity, check_hidden
from kvxfer.doctor.ask import ask_all
from kvxfer.doctor.build import check_build
from kvxfer.doctor.findings import Finding, counts
from kvxfer.doctor.gpudirect import check_gpudirect
from kvxfer.doctor.gpus import check_gpus, find_gpus
from kvxfer.doctor.host import check_host, describe_host
from kvxfer.doctor.nic_checks import check_nics
from kvxfer.doctor.nics import find_nics
from kvxfer.doctor.tree import Tree
from kvxfer.transports import Transport, transports


@dataclass(frozen=True)
class Examination:
    """What was found."""

    version: str
    host: dict[str, object]
    findings: list[Finding]
    affinity: Affinity | None

    @property
    def status(self) -> int:
        """The exit status: 1 when something would hurt."""
        return int(any(finding.hurts for finding in self.findings))

    def record(self) -> dict[str, object]:
        """Return the object that ``--json`` prints: docs/schemas/doctor.json."""
        return {
            "kvxfer": self.version,
            "host": self.host,
            "findings": [finding.record() for finding in self.findings],
            "affinity": None if self.affinity is None else self.affinity.record(),
            "summary": counts(self.findings),
            "exit_status": self.status,
        }


def examine(
    tree: Tree,
    self_test: bool,
    peer: Callable[[dict[str, Transport]], list[Finding]] | None = None,
) -> Examination:
    """Examine a host; the self-test and `peer` only on the one that this process runs on."""
    known = _transports()
    producer = None
    if self_test and tree.live and known:
        from kvxfer.doctor.selftest import (  # they need the compiled part
            Producer,
            check_gpu_memory,
            test_paths,
        )

        producer = Producer()
    try:
        answers = ask_all(tree)
        gpus, nics = find_gpus(tree, answers), find_nics(tree, answers)
        affinity = affinity_of(gpus, nics)
        verbs = "verbs" in known and known["verbs"].available
        findings = check_build(known, answers) if tree.live else []
        findings += check_gpus(tree, gpus, answers)
        findings += check_nics(tree, nics, answers, verbs)
        findings += check_affinity(affinity)
        findings += check_hidden(gpus, nics, answers)
        findings += check_gpudirect(tree, gpus, affinity, answers)
        findings += check_host(tree, gpus, nics, os.environ)
        if producer is not None:
            findings += test_paths(known, producer)
            if answers["cuda"].get("devices") or answers["hip"].get("devices"):
                findings.append(check_gpu_memory())
        if peer is not None and known:
            findings += peer(known)
    finally:
        if producer is not None:
            producer.close()
    return Examination(_version(), describe_host(tree), findings, affinity)


def _transports() -> dict[str, Transport]:
    """Return the transports; none where the compiled part can't be loaded, which build tells."""
    try:
        return transports()
    except ImportError:
        return {}


def _version() -> str:
    try:
        return metadata.version("kvxfer")
    except metadata.PackageNotFoundError:  # run from a folder, and never installed
        return "unknown"
