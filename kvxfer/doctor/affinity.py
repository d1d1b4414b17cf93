"""Which adapter is near which GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.doctor.findings import Finding, State
from kvxfer.doctor.gpus import Gpu
from kvxfer.doctor.nics import Nic
from kvxfer.doctor.pci import DEVICES, LEVEL_MEANING, LEVELS, level


@dataclass(frozen=True)
class Affinity:
    """How far each GPU is from each adapter, in the words of ``nvidia-smi topo``."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    levels: tuple[tuple[str, ...], ...]
    """By GPU, then by adapter."""

    def best(self, gpu: int) -> str:
        """Return the level of the adapter nearest to a GPU."""
        return min(self.levels[gpu], key=LEVELS.index)

    def nearest(self, gpu: int) -> list[Nic]:
        """Return the adapters that are nearest to a GPU."""
        best = self.best(gpu)
        return [nic for nic, at in zip(self.nics, self.levels[gpu], strict=True) if at == best]

    def record(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "gpus": [gpu.address for gpu in self.gpus],
            "nics": [nic.name for nic in self.nics],
            "levels": [list(row) for row in self.levels],
        }

    def lines(self) -> list[str]:
        """Return the matrix as text, with what its words mean."""
        width = max(len(nic.name) for nic in self.nics)
        lines = [" ".join([" " * 18, *(nic.name.rjust(width) for nic in self.nics)])]
        for index, (gpu, row) in enumerate(zip(self.gpus, self.levels, strict=True)):
            title = f"GPU{index} {gpu.address}".ljust(18)
            lines.append(" ".join([title, *(at.rjust(width) for at in row)]))
        used = [at for at in LEVELS if any(at in row for row in self.levels)]
        return lines + [f"{at}: {LEVEL_MEANING[at]}" for at in used]


def affinity_of(gpus: list[Gpu], nics: list[Nic]) -> Affinity | None:
    """Return the matrix, or None where there are no GPUs or no adapters on the PCI bus."""
    real = [(nic, nic.device) for nic in nics if nic.device is not None]
    if not gpus or not real:
        return None
    return Affinity(
        tuple(gpus),
        tuple(nic for nic, _ in real),
        tuple(tuple(level(gpu.device, device) for _, device in real) for gpu in gpus),
    )


def check_hidden(
    gpus: list[Gpu], nics: list[Nic], answers: dict[str, dict[str, Any]]
) -> list[Finding]:
    """Return which GPUs the vendors' libraries know and the PCI bus does not show."""
    told = {
        str(device["pci"])
        for answer in (answers["cuda"], answers["hip"])
        for device in answer.get("devices", ())
    }
    hidden = sorted(told - {gpu.address for gpu in gpus})
    if not hidden or not nics:
        return []
    return [
        Finding(
            "affinity.hidden",
            ", ".join(hidden),
            f"not in {DEVICES}",
            State.WARN,
            "which adapters are near can't be seen, so agents with caches there use all of them",
            "let the container see /sys of the host, or set KVXFER_VERBS_NEAR or "
            "KVXFER_VERBS_DEVICES for each agent",
        )
    ]


def check_affinity(affinity: Affinity | None) -> list[Finding]:
    """Return whether each GPU has an adapter near it."""
    if affinity is None:
        return []
    far = [
        f"{gpu.name} {gpu.address}"
        for index, gpu in enumerate(affinity.gpus)
        if affinity.best(index) == "SYS"
    ]
    found = "; ".join(
        f"GPU{index}: {', '.join(nic.name for nic in affinity.nearest(index)[:2])} "
        f"({affinity.best(index)})"
        for index in range(len(affinity.gpus))
    )
    findings = [Finding("affinity.nearest", "nearest adapters", found)]
    if far:
        findings.append(
            Finding(
                "affinity.far",
                ", ".join(far),
                "no adapter on its side of the host",
                State.WARN,
                "all that it sends crosses the link between CPUs, which all GPUs share",
                "move an adapter to a slot of that CPU; until then leave its transfers to others",
            )
        )
    return findings
