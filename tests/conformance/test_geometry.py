"""Any geometry on either side: every byte where it belongs, and no other byte touched."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from kvtest.agents import LONG, registered
from kvtest.caches import Paged
from kvtest.child import Child
from kvtest.strategies import Case, cases, examples

import kvxfer

_ids = (f"case-{number}" for number in itertools.count())


def expected_of(case: Case, source: Paged) -> Paged:
    expected = Paged(case.consumer)
    expected.deliver(
        [source],
        case.producer_blocks,
        case.consumer_blocks,
        case.wanted,
        offered_from=case.offered[0],
        first_slot=case.slot,
    )
    return expected


def fetch_case(
    agent: kvxfer.Agent, ticket: kvxfer.Ticket, target: Paged, case: Case
) -> kvxfer.Report:
    fetch = agent.fetch(
        json.loads(json.dumps(ticket)),
        target.cache,
        case.consumer_blocks,
        tokens=slice(*case.wanted),
        first_slot=case.first_slot,
        timeout=LONG,
    )
    fetch.wait()
    return fetch.report


@settings(max_examples=examples(40))
@given(case=cases())
def test_within_a_process(agents: tuple[kvxfer.Agent, kvxfer.Agent], case: Case) -> None:
    prefill, decode = agents
    source, target = Paged(case.producer, case.seed), Paged(case.consumer)
    with registered(prefill, source.cache), registered(decode, target.cache):
        offer = prefill.offer(
            source.cache,
            case.producer_blocks,
            case.offered[1] - case.offered[0],
            first_token=case.offered[0],
        )
        report = fetch_case(decode, offer.ticket, target, case)
        assert offer.wait(LONG) is kvxfer.Status.OK
    assert target.same_as(expected_of(case, source))
    rows = (case.wanted[1] - case.wanted[0]) * case.consumer.num_heads
    row = case.consumer.content * source.arrays[0][0].itemsize
    assert report.bytes == rows * row * len(case.consumer.layers) * len(case.consumer.planes)


@settings(max_examples=examples(20))
@given(case=cases())
def test_between_processes(child: Child, decode: kvxfer.Agent, case: Case) -> None:
    """The same with the producer in another process; its bytes are known from the seed."""
    name = next(_ids)
    target = Paged(case.consumer)
    child.call("cache", name, case.producer, case.seed)
    ticket = child.call(
        "offer",
        name,
        case.producer_blocks,
        case.offered[1] - case.offered[0],
        first_token=case.offered[0],
    )
    with registered(decode, target.cache):
        fetch_case(decode, ticket, target, case)
    assert child.call("wait_offer", ticket["offer"]) == "OK"
    child.call("forget", name)
    assert target.same_as(expected_of(case, Paged(case.producer, case.seed)))
