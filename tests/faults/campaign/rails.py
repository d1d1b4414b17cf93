"""What links over adapters say about their queue pairs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer import _core

_LINK = re.compile(r"(?=verbs, \d+ rails?)")
_QUEUE_PAIRS = re.compile(r", (\d+) queue pairs?(?=[;,]|$)")


def queue_pairs(report: _core.FetchReport) -> dict[str, int | None]:
    """Return how many each peer's link had at the end of a fetch; None where some were lost."""
    links = [text for text in _LINK.split(report.link) if text.startswith("verbs")]
    if len(links) != len(report.peers):
        return {}
    return {
        peer: None if " lost: " in text else sum(map(int, _QUEUE_PAIRS.findall(text)))
        for peer, text in zip(report.peers, links, strict=True)
    }
