"""Tickets: what they carry, and that nothing else than them is taken for one."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvxfer
from kvxfer.ticket import VERSION, parse_ticket

RANKS = [
    kvxfer.AgentRef(
        name=f"rank-{rank}",
        address=f"10.0.0.{rank}:7000",
        incarnation=0xABC0 + rank,
        layers=("layer.0", "layer.1"),
        heads=(4 * rank, 4 * rank + 4),
    )
    for rank in range(2)
]


def issue(**changes: object) -> kvxfer.Ticket:
    options = {"num_tokens": 700, "first_token": 64, "model": "llama", **changes}
    return kvxfer.issue_ticket("request-7", RANKS, **options)


@pytest.mark.parametrize("secret", [None, "s3cret"])
def test_what_it_carries_survives_json(secret: str | None) -> None:
    ticket = json.loads(json.dumps(issue(secret=secret, generation=bytes(range(16)))))
    parsed = parse_ticket(ticket, secret)
    assert parsed.offer_id == "request-7"
    assert parsed.generation == bytes(range(16))
    assert (parsed.first_token, parsed.num_tokens) == (64, 700)
    assert parsed.model == "llama"
    assert parsed.agents == tuple(RANKS)


def test_what_was_left_out_stays_unknown() -> None:
    reference = kvxfer.AgentRef(name="a", address="h:1")
    parsed = parse_ticket(kvxfer.issue_ticket("r", [reference], num_tokens=1), None)
    assert parsed.agents == (reference,)
    assert parsed.model == ""


@pytest.mark.parametrize("layers", [(0, 1), ("layer.0", None), "layer.0"], ids=str)
def test_layers_that_are_no_names_are_not_issued(layers: object) -> None:
    agent = kvxfer.AgentRef(name="a", address="h:1", layers=layers)  # type: ignore[arg-type]
    with pytest.raises(kvxfer.TicketError, match="name"):
        kvxfer.issue_ticket("r", [agent], num_tokens=1)


def test_generations_are_drawn_anew() -> None:
    assert len({issue()["generation"] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tokens": 0}, "at least one token"),
        ({"first_token": -1}, "at least one token"),
        ({"num_tokens": 1 << 32}, r"2\^32"),
        ({"generation": b"short"}, "16 bytes, not 5"),
    ],
)
def test_what_cannot_be_issued(changes: dict[str, object], words: str) -> None:
    with pytest.raises(kvxfer.TicketError, match=words):
        issue(**changes)


def test_integers_of_numpy_are_integers_and_floats_are_none() -> None:
    ranks = [kvxfer.AgentRef(name="a", address="h:1", heads=(np.int32(0), np.int64(4)))]
    numbers = {"num_tokens": np.int64(700), "first_token": np.uint32(64)}
    ticket = json.loads(json.dumps(kvxfer.issue_ticket("r", ranks, **numbers)))
    parsed = parse_ticket(ticket, None)
    assert (parsed.num_tokens, parsed.first_token) == (700, 64)
    assert parsed.agents[0].heads == (0, 4)
    for change in ({"num_tokens": 1.5}, {"first_token": 0.5}, {"num_tokens": "7"}):
        with pytest.raises(TypeError, match="interpreted as an integer"):
            issue(**change)


def test_a_ticket_needs_an_id_and_agents() -> None:
    with pytest.raises(kvxfer.TicketError, match="offer id"):
        kvxfer.issue_ticket("", RANKS, num_tokens=1)
    with pytest.raises(kvxfer.TicketError, match="at least one agent"):
        kvxfer.issue_ticket("r", [], num_tokens=1)


@pytest.mark.parametrize(
    "garbage",
    [None, 0, "ticket", b"ticket", [], {}, {"offer": "r"}, ["kvxfer"], object()],
    ids=repr,
)
def test_garbage(garbage: object) -> None:
    with pytest.raises(kvxfer.TicketError, match="not a kvxfer ticket"):
        parse_ticket(garbage, None)


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", None])
def test_another_version(version: object) -> None:
    with pytest.raises(kvxfer.TicketError, match="has version .* this side reads 1: install"):
        parse_ticket({**issue(), "kvxfer": version}, None)


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for index, one in enumerate(value) for leaf in leaves(one, (*path, index))]
    return [path]


@pytest.mark.parametrize("secret", [None, "s3cret"])
@pytest.mark.parametrize("path", leaves(issue()), ids=str)
def test_any_value_that_was_changed_on_the_way(path: tuple, secret: str | None) -> None:
    ticket = issue(secret=secret)
    holder = ticket
    for step in path[:-1]:
        holder = holder[step]
    old = holder[path[-1]]
    holder[path[-1]] = (
        old + 1 if isinstance(old, int) else old[:-1] + ("0" if old[-1] != "0" else "1")
    )
    with pytest.raises(kvxfer.TicketError):
        parse_ticket(ticket, secret)


@pytest.mark.parametrize("key", sorted(issue()))
def test_any_part_that_is_missing(key: str) -> None:
    ticket = issue()
    del ticket[key]
    with pytest.raises(kvxfer.TicketError):
        parse_ticket(ticket, None)


def test_a_part_that_was_added() -> None:
    with pytest.raises(kvxfer.TicketError, match="changed on its way"):
        parse_ticket({**issue(), "more": 1}, None)


@pytest.mark.parametrize(
    ("issued", "read"), [("one", "two"), ("one", None), (None, "two")], ids=str
)
def test_other_secrets(issued: str | None, read: str | None) -> None:
    with pytest.raises(kvxfer.TicketError, match="'request-7'.*secrets.*KVXFER_SECRET"):
        parse_ticket(issue(secret=issued), read)


def test_a_signature_that_is_no_text() -> None:
    for signature in (None, 7, ["sha256"], "säure", "\ud800"):
        with pytest.raises(kvxfer.TicketError):
            parse_ticket({**issue(), "signature": signature}, None)


def resigned(ticket: kvxfer.Ticket) -> kvxfer.Ticket:
    """What somebody could make who knows how, where there is no secret."""
    from kvxfer.ticket import _signature

    return {**ticket, "signature": _signature(ticket, None)}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [0, 0]},
        {"tokens": [-1, 5]},
        {"tokens": [0, 1 << 32]},
        {"tokens": [1]},
        {"tokens": None},
        {"tokens": ["a", "b"]},
        {"tokens": [0, float("inf")]},
        {"tokens": [0, float("nan")]},
        {"generation": "00"},
        {"generation": "zz" * 16},
        {"generation": 7},
        {"agents": []},
        {"agents": None},
        {"agents": [{}]},
        {"agents": [7]},
        {"agents": [{**issue()["agents"][0], "incarnation": "xyz"}]},
        {"agents": [{**issue()["agents"][0], "incarnation": 5}]},
        {"agents": [{**issue()["agents"][0], "heads": [1]}]},
        {"agents": [{**issue()["agents"][0], "heads": "ab"}]},
        {"agents": [{**issue()["agents"][0], "incarnation": "-5"}]},
        {"agents": [{**issue()["agents"][0], "incarnation": "1" + 16 * "0"}]},
        {"agents": [{**issue()["agents"][0], "layers": 5}]},
        {"agents": [{**issue()["agents"][0], "layers": [5]}]},
        {"agents": [{**issue()["agents"][0], "layers": ["l", None]}]},
        {"agents": [{**issue()["agents"][0], "layers": "layer.0"}]},
        {"agents": [{**issue()["agents"][0], "name": 5}]},
        {"agents": [{**issue()["agents"][0], "address": ["127.0.0.1:1"]}]},
        {"offer": 5},
        {"model": None},
        {"agents": [{**issue()["agents"][0], "name": "\ud800"}]},
        {"agents": [{**issue()["agents"][0], "heads": [0, 1.5]}]},
        {"offer": "\ud800"},
        {"tokens": [0, 1.5]},
    ],
    ids=str,
)
def test_signed_nonsense(changes: dict[str, object]) -> None:
    with pytest.raises(kvxfer.TicketError, match="signed but malformed"):
        parse_ticket(resigned({**issue(), **changes}), None)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    st.sampled_from(sorted(issue())),
)
def test_signed_nonsense_of_any_kind(value: object, key: str) -> None:
    """Whatever a part is replaced by, it is a TicketError or a ticket again."""
    ticket = copy.deepcopy(issue())
    ticket[key] = value
    try:
        parse_ticket(resigned(ticket) if key != "signature" else ticket, None)
    except kvxfer.TicketError:
        pass


def test_values_that_json_cannot_carry() -> None:
    with pytest.raises(kvxfer.TicketError, match="JSON cannot carry"):
        parse_ticket({**issue(), "model": object()}, None)
    loop: dict[str, object] = issue()
    loop["agents"] = loop
    with pytest.raises(kvxfer.TicketError, match="JSON cannot carry"):
        parse_ticket(loop, None)
