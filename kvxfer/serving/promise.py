"""What is promised of requests. By itself, for command lines offer the choice."""

from __future__ import annotations

import enum


class Promise(str, enum.Enum):
    """What it means that a share of the requests met the SLO. Published figures use both."""

    JOINT = "joint"
    """So many requests met TTFT and TPOT, each both."""

    SEPARATE = "separate"
    """So many met TTFT, and so many, perhaps others, TPOT: two percentiles."""
