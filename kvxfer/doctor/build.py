"""What was built, and which libraries there are for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.doctor.findings import Finding, State
from kvxfer.errors import Error
from kvxfer.transports import Transport

_INSTALL = {
    "verbs": "apt install libibverbs1 ibverbs-providers (dnf install libibverbs)",
    "hip": "ROCm's HIP runtime, from repo.radeon.com",
    "cuda": "NVIDIA's driver, from the distribution or developer.nvidia.com",
}


def check_build(
    transports: dict[str, Transport], answers: dict[str, dict[str, Any]]
) -> list[Finding]:
    """Return what this build has, and for what it has not, why and what to do."""
    try:
        from kvxfer import _core
    except ImportError as error:
        return [_unloadable(error), *(_library(name, it, True) for name, it in answers.items())]
    info = _core.build_info()
    plain = info["build_type"] in ("Release", "RelWithDebInfo") and not info["sanitize"]
    sanitized = f", with {info['sanitize']}" if info["sanitize"] else ""
    findings = [
        Finding(
            "build.core",
            f"kvxfer {info['version']}",
            f"{info['compiler']}, {info['build_type'] or 'no build type'}{sanitized}",
            State.OK if plain else State.WARN,
            "" if plain else "a build for finding faults, several times slower",
            "" if plain else "pip install kvxfer, or make build",
        ),
        _simd(_core.simd_variants(), _core.simd_variant),
    ]
    findings += [_transport(transport) for transport in transports.values()]
    for name, back_end in info["back_ends"].items():
        if name in transports:
            continue
        on = back_end["state"] == "on"
        state = State.OK if on else State.INFO
        findings.append(
            Finding("build.back_end", f"back end {name}", back_end["reason"] or "on", state)
        )
    for name, answer in answers.items():
        used = name in info["back_ends"] and info["back_ends"][name]["state"] == "on"
        findings.append(_library(name, answer, used))
    return findings


def _unloadable(error: ImportError) -> Finding:
    return Finding(
        "build.core",
        "kvxfer's compiled part",
        f"it can't be loaded: {error}",
        State.BAD,
        "no agent starts, so nothing is transferred",
        "pip install --force-reinstall kvxfer with the Python that runs it, or make build",
    )


def _simd(variants: list[str], chosen: Callable[[], str]) -> Finding:
    try:
        used = chosen()
    except Error as error:  # KVXFER_SIMD names one that there is not
        why = "no agent starts with it"
        return Finding("build.simd", "SIMD", str(error), State.BAD, why, "unset KVXFER_SIMD")
    found = f"{used}; there are {', '.join(variants)}"
    if used == variants[0] and used != "scalar":
        return Finding("build.simd", "SIMD", found)
    if variants == ["scalar"]:
        return Finding(
            "build.simd",
            "SIMD",
            "none on this processor",
            State.WARN,
            "packing and codecs run at a fraction of the speed",
            "x86-64 with AVX2 or arm64 has variants",
        )
    why = "a slower variant than this processor has was chosen"
    return Finding("build.simd", "SIMD", found, State.WARN, why, "unset KVXFER_SIMD")


def _transport(transport: Transport) -> Finding:
    state = State.OK if transport.available else State.INFO
    found = transport.why if transport.available else f"not available: {transport.why}"
    return Finding("build.transport", f"transport {transport.name}", found, state)


def _library(name: str, answer: dict[str, Any], used: bool) -> Finding:
    what = f"library for {name}"
    if missing := answer.get("missing"):
        if not used:
            found = f"{missing}; this build would not use it"
            return Finding("build.library", what, found, State.INFO)
        return Finding("build.library", what, missing, State.INFO, fix=_INSTALL[name])
    if error := answer.get("error"):
        return Finding("build.library", what, f"{answer.get('library', '')} {error}", State.INFO)
    version = f" {answer['version']}" if answer.get("version") else ""
    seen = f", {len(answer['devices'])} devices" if "devices" in answer else ""
    return Finding("build.library", what, f"{answer['library']}{version}{seen}")
