"""The real engine over loopback, driven by hypothesis: whatever is done, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged
from kvtest.strategies import examples

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=("a", "b"), content=16, num_blocks=8, block_size=4)
OTHER = Geometry(layers=("a", "b"), content=16, num_blocks=8, block_size=4, axes="BNHC")
BLOCKS = [5, 0, 3]
TOKENS = 11
FEW_SLOTS = {"arena_bytes": 8 << 10, "chunk_bytes": 4 << 10}


@dataclass
class Issued:
    """A ticket; what is offered under it follows from its number."""

    number: int
    ticket: kvxfer.Ticket
    expected: int


@dataclass
class Made:
    issued: Issued
    offer: kvxfer.Offer
    source: Paged
    reused: bool = False


@dataclass
class Asked:
    number: int
    fetch: kvxfer.Fetch
    target: Paged
    wanted: Paged | None = None  # what has to be there from its end on


def delivered(number: int) -> Paged:
    wanted = Paged(OTHER)
    wanted.deliver([Paged(SIDE, number)], BLOCKS, BLOCKS, (0, TOKENS))
    return wanted


class Transfers(RuleBasedStateMachine):
    """Each offer has a cache of its own, filled by its number, and each fetch too."""

    tickets = Bundle("tickets")
    offers = Bundle("offers")
    fetches = Bundle("fetches")

    def __init__(self) -> None:
        super().__init__()
        self.prefill = producer("loopback", **FEW_SLOTS)
        self.decode = consumer("loopback", **FEW_SLOTS)
        self.count = 0
        self.made: list[Made] = []
        self.asked: list[Asked] = []
        self.rejected: set[int] = set()

    @rule(target=tickets, expected=st.integers(1, 2))
    def issue(self, expected: int) -> Issued:
        self.count += 1
        reference = self.prefill.reference()
        ticket = kvxfer.issue_ticket(f"r{self.count}", [reference], num_tokens=TOKENS)
        return Issued(self.count, ticket, expected)

    @rule(target=offers, issued=consumes(tickets), ready=st.booleans())
    def offer(self, issued: Issued, ready: bool) -> Made:
        source = Paged(SIDE, issued.number)
        self.prefill.register(source.cache)
        try:
            offer = self.prefill.offer(
                source.cache,
                BLOCKS,
                ticket=issued.ticket,
                consumers=issued.expected,
                ready=ready,
            )
        except kvxfer.InvalidError:
            assert issued.number in self.rejected
            return multiple()
        self.made.append(Made(issued, offer, source))
        return self.made[-1]

    @rule(issued=tickets)
    def reject(self, issued: Issued) -> None:
        self.prefill.reject(issued.ticket, "no")
        self.rejected.add(issued.number)

    @rule(target=fetches, issued=tickets)
    def fetch_early(self, issued: Issued) -> Asked:
        return self._fetch(issued)

    @rule(target=fetches, made=offers)
    def fetch(self, made: Made) -> Asked:
        return self._fetch(made.issued)

    def _fetch(self, issued: Issued) -> Asked:
        target = Paged(OTHER)
        self.decode.register(target.cache)
        fetch = self.decode.fetch(issued.ticket, target.cache, BLOCKS, timeout=LONG)
        self.asked.append(Asked(issued.number, fetch, target))
        return self.asked[-1]

    @rule(made=offers)
    def decline(self, made: Made) -> None:
        target = Paged(OTHER)
        self.decode.register(target.cache)
        self.decode.decline(made.issued.ticket, target.cache, timeout=LONG)

    @rule(made=offers)
    def renew(self, made: Made) -> None:
        self.decode.renew(made.issued.ticket)

    @rule(made=offers, layer=st.sampled_from(SIDE.layers))
    def ready(self, made: Made, layer: str) -> None:
        made.offer.mark_ready(layer)

    @rule(made=offers)
    def release(self, made: Made) -> None:
        made.offer.release()

    @rule(asked=fetches, done=st.booleans())
    def cancel(self, asked: Asked, done: bool) -> None:
        asked.fetch.cancel(done=done)
        assert asked.fetch.done

    @rule(asked=fetches)
    def wait(self, asked: Asked) -> None:
        """Where it can come to an end by itself, see that it does."""
        offers = [made.offer for made in self.made if made.issued.number == asked.number]
        if not offers:
            return
        offers[0].mark_all_ready()
        until(lambda: asked.fetch.done)

    @rule()
    def restart_consumer(self) -> None:
        self.decode.close()
        assert all(asked.fetch.done for asked in self.asked)
        self.decode = consumer("loopback", **FEW_SLOTS)

    @rule()
    def restart_producer(self) -> None:
        self.prefill.close()
        assert all(made.offer.released for made in self.made)
        self.prefill = producer("loopback", **FEW_SLOTS)

    @invariant()
    def blocks_that_are_free_are_used_again(self) -> None:
        for made in self.made:
            if made.offer.released and not made.reused:
                made.source.poison()
                made.reused = True
        for asked in self.asked:
            if not asked.fetch.done or asked.wanted is not None:
                continue
            if asked.fetch.status is Status.OK:
                asked.wanted = delivered(asked.number)
            else:
                assert asked.fetch.status in (
                    Status.CANCELLED,
                    Status.CLOSED,
                    Status.PEER_LOST,
                    Status.STALE,
                    Status.UNREACHABLE,
                    Status.WITHDRAWN,
                ), asked.fetch.error
                asked.target.poison()
                asked.wanted = Paged(OTHER)
            assert asked.target.same_as(asked.wanted)

    def teardown(self) -> None:
        try:
            for made in self.made:
                made.offer.mark_all_ready()
            for asked in self.asked:
                if asked.number not in {made.issued.number for made in self.made}:
                    asked.fetch.cancel()
            until(lambda: all(asked.fetch.done for asked in self.asked))
            for made in self.made:
                made.offer.release()
                made.offer.wait(LONG)
            self.blocks_that_are_free_are_used_again()
            until(lambda: self._held() == 0)
            # Nothing came late.
            for asked in self.asked:
                assert asked.wanted is not None
                assert asked.target.same_as(asked.wanted)
        finally:
            self.decode.close()
            self.prefill.close()

    def _held(self) -> int:
        ours, theirs = self.decode.stats, self.prefill.stats
        slots = ours.slots - ours.free_slots + ours.quarantined_slots
        return slots + ours.fetches + theirs.offers + theirs.serving


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=examples(40), stateful_step_count=30)
