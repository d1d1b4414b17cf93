"""Whether a link can hide the transfers of a placement behind the prefill."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.serving.cost_model import Link, PrefillCost


@dataclass(frozen=True, slots=True)
class Placement:
    """Prefill and decode engines joined by one kind of link."""

    name: str
    """For people: NVLink, InfiniBand, Ethernet."""

    link: Link
    needed_bytes_per_second: float
    """What the KV of a prefill at full speed takes."""

    exposed: float
    """Seconds that the transfer adds to the TTFT of the prompt looked at."""

    @property
    def hidden(self) -> bool:
        """Whether the link keeps up; then all but the last layer is free."""
        return self.link.layers > 1 and self.link.bytes_per_second >= self.needed_bytes_per_second

    @property
    def verdict(self) -> str:
        """What to tell the operator."""
        have, need = (
            rate / 1e9 for rate in (self.link.bytes_per_second, self.needed_bytes_per_second)
        )
        if self.hidden:
            return f"hidden: {have:.3g} GB/s, {need:.3g} needed; adds {self.exposed * 1e3:.3g} ms"
        if self.link.layers <= 1:
            return f"not overlapped with the prefill; adds {self.exposed * 1e3:.3g} ms"
        return f"not hidden: {have:.3g} of {need:.3g} GB/s; adds {self.exposed * 1e3:.3g} ms"


def judge(name: str, link: Link, prefill: PrefillCost, tokens: int) -> Placement:
    """Return what `link` does to a prompt of `tokens` prefilled at `prefill`'s speed."""
    seconds = prefill.prompt(tokens)
    needed = tokens * link.kv_bytes_per_token / seconds
    return Placement(name, link, needed, link.exposed(tokens, seconds))
