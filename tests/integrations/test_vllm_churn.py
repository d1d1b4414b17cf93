"""Many requests against few blocks and short leases, with aborts, delays and kills at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


class Churn:
    """Sends prompts through a pair of engines like a proxy without mercy."""

    def __init__(
        self, pair: Any, fake: Any, make: Callable[[str], Any], dice: random.Random
    ) -> None:
        self._pair, self._fake, self._make, self.dice = pair, fake, make, dice
        self.p, self.d = make("kv_producer"), make("kv_consumer")
        self.stats: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self.standing: dict[str, Any] | None = None
        self._prefills: dict[str, list[int]] = {}
        self._late: dict[str, list[int]] = {}  # fetched only when the blocks are somebody else's
        self._decodes: dict[str, tuple[list[int], int]] = {}
        self._aborted: set[str] = set()

    @property
    def open(self) -> int:
        return len(self._prefills) + len(self._late) + len(self._decodes)

    def begin(self, number: int) -> None:
        tokens = self._pair.prompt(self.dice.randrange(1, 200), number)
        more = {}
        if self.standing is not None and self.dice.random() < 0.5:  # both sides at once
            more = {"transfer_id": f"transfer-{number}"}
            if self.dice.random() < 0.9:
                self._decode({**self.standing, **more}, tokens)
        params = self._fake.prefill_params(**more)
        name = self.p.add(tokens, params=params, max_tokens=self.dice.choice((1, 1, 3)))
        if not more:
            self._prefills[name] = tokens

    def _decode(self, params: dict[str, Any] | None, tokens: list[int]) -> None:
        length = self.dice.randrange(1, 5)
        name = self.d.add(tokens, params=params, max_tokens=length)
        self._decodes[name] = tokens, length

    def abort(self, chance: float) -> None:
        for side, names in ((self.p, list(self.p.scheduler.requests)), (self.d, self._decodes)):
            if names and self.dice.random() < chance:
                name = self.dice.choice(list(names))
                side.abort(name)
                self._aborted.add(name)

    def kill(self, chance: float) -> None:
        """End a process without a word to anybody; another takes its place."""
        if self.dice.random() < chance:
            for name in self.p.answers:
                self._aborted.add(name)
            self._prefills.clear()
            self._late.clear()
            self._replace("p")
        if self.dice.random() < chance:
            self._decodes.clear()
            self._replace("d")

    def _replace(self, which: str) -> None:
        old = getattr(self, which)
        assert not old.wrong, old.wrong[:3]
        self._count(old)
        for rank in old.ranks:
            rank.worker.worker._agent.close()
        setattr(self, which, self._make(old.config.kv_transfer_config.kv_role))

    def _count(self, engine: Any) -> None:
        for name, value in engine.stats.items():
            if isinstance(value, dict):
                for reason, count in value.items():
                    self.failures[reason] = self.failures.get(reason, 0) + count
            else:
                self.stats[name] = self.stats.get(name, 0) + value

    def step(self) -> None:
        self.p.step()
        self.d.step()
        for name in [n for n in self._prefills if self._ended(self.p, n)]:
            tokens, params = self._prefills.pop(name), self.p.answers[name]["params"]
            if params is not None:
                self.standing = {
                    **params,
                    "kvxfer": {k: v for k, v in params["kvxfer"].items() if k != "offer"},
                }
            chance = self.dice.random()
            if params is None or chance < 0.1:
                continue  # nobody fetches it
            if chance < 0.3:
                self._late[name] = tokens
            else:
                self._decode(params, tokens)
        for name in [n for n in self._late if self.p.status(n) is None]:
            self._decode(self.p.answers[name]["params"], self._late.pop(name))
        for name in [n for n in self._decodes if self._ended(self.d, n)]:
            tokens, length = self._decodes.pop(name)
            if name not in self._aborted:
                self._pair.check(self.d, name, tokens, length)

    def _ended(self, engine: Any, name: str) -> bool:
        return engine.answers[name]["finish"] is not None or name in self._aborted

    def end(self) -> None:
        self._pair.settle(self.p, self.d)
        assert not self.p.wrong
        for engine in (self.p, self.d):
            self._count(engine)
            for rank in engine.ranks:
                agent = rank.worker.worker._agent
                # What was declined to an engine that is gone ends by its timeout at last.
                self._pair.step_until(
                    lambda agent=agent: (agent.stats.offers, agent.stats.fetches) == (0, 0), engine
                )


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("kills", [0.0, 0.02])
def test_churn(engine: Callable[..., Any], pair: Any, fake: Any, count: int, kills: float) -> None:
    """No wrong token, no lost block, no hang."""
    extra = {"kv_producer": {"lease": 0.05}, "kv_consumer": {"load_timeout": 5}}

    def make(role: str) -> Any:
        return engine(role, num_blocks=24, prefix_caching=False, extra=extra[role])

    churn = Churn(pair, fake, make, random.Random(count))
    begun = 0
    deadline = time.monotonic() + 120 + count / 2
    while begun < count or churn.open:
        if time.monotonic() > deadline:
            pytest.fail(f"{begun} begun, {churn.open} open")
        if begun < count and churn.open < 8:
            churn.begin(begun)
            begun += 1
        churn.abort(0.05)
        if begun < count:
            churn.kill(kills)
        churn.step()
    churn.end()
    assert churn.stats["loads"] > 0
    assert churn.stats["leases_expired"] > 0
    assert churn.failures["expired"] > 0
    if kills:
        assert churn.failures.keys() & {"closed", "peer_lost", "unreachable", "stale"}
