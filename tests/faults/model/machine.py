"""Offer, fetch, commit, cancel, lease, reuse and crash, for one block and two slots.

A producer has one block, which it offers under one generation after the other, and overwrites
whenever it was given back. A consumer has two slots and fetches twice, one chunk each. Between them
is one connection over shared memory, the kind on which most can go wrong: the producer writes into
slots by itself. The connection keeps the order of messages and may break at any moment, with all
that is on its way; the producer's process may die; memory may go bad. Packing takes time: it
begins, it writes, it commits.

`explore` visits every state that can come about, and checks that in none of them

* a slot is written after it was given back, or a block read after it was;
* a fetch ends well with anything but what was offered under the generation that it asked for;
* a fetch, a slot or a block is held for ever: what both sides do by themselves must lead to rest.

Each name in `MUTANTS` is a rule that can be left out. A check that does not notice that is worth
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from faults.model.visit import visit

FETCHES = 2
GENERATIONS = 2
GARBAGE, BAD = 0, -1

MUTANTS = {
    "quarantine": "a cancelled fetch's slot is free at once",
    "fence": "a lost connection's slots are free at once",
    "generation": "the producer serves whatever it holds",
    "reading": "the block is given back while it is being packed",
    "promise": "CANCELLED is said while a pack still writes",
    "fetch id": "a COMMIT counts for whichever fetch is running, whatever its digest",
    "digest": "the digest is not compared",
    "deadline": "a fetch waits for ever, and nobody notices silence",
    "refusal": "REFUSED does not give back what was granted",
}

Message = tuple[str, int, int, int, int]  # kind, fetch, generation, slot, content by its digest


class Slot(NamedTuple):
    state: str = "free"  # granted, quarantined
    fetch: int = 0  # that it was granted for
    content: int = GARBAGE  # the generation of what lies in it


class State(NamedTuple):
    # Producer.
    block: int = GARBAGE  # the generation of what it holds
    offer: int = 0  # open under this generation; 0: none
    offered: int = 0  # generations used so far
    given_back: bool = True  # the engine may overwrite the block
    serve: tuple[int, int, int] | None = None  # fetch, generation, slot
    last_word: str = ""  # that is still to be said
    pack: str = ""  # reading, written, committed
    # Consumer.
    fetch: int = 0  # the running one; 0: none
    wanted: int = 0  # its generation
    started: int = 0
    slots: tuple[Slot, Slot] = (Slot(), Slot())
    # Connection.
    link: str = "open"  # broken: nothing arrives; fenced: the producer has let go; closed
    up: tuple[Message, ...] = ()  # to the producer
    down: tuple[Message, ...] = ()
    dead: bool = False  # the producer's process
    wrong: str = ""


def explore(without: str = "") -> tuple[int, str]:
    """Visit all states. Returns how many there are, and what is wrong: "" for nothing."""
    return visit(State(), lambda state: steps(state, without), at_rest)


def at_rest(s: State) -> bool:
    free = all(slot.state == "free" for slot in s.slots)
    return s.fetch == 0 and free and s.serve is None and s.given_back


def steps(s: State, without: str) -> Iterator[tuple[State, bool]]:
    """All that can happen next, and whether it happens by itself: accidents and wishes do not."""
    for following in (*_producer(s, without), *_consumer(s, without)):
        yield following, True
    if not s.offer and s.given_back and s.offered < GENERATIONS and not s.dead:
        new = s.offered + 1
        yield s._replace(block=new, offer=new, offered=new, given_back=False), False
    if s.fetch == 0 and s.started < FETCHES and s.link == "open":
        for wanted in range(1, GENERATIONS + 1):
            yield from ((began, False) for began in _begin(s, wanted))
    if s.link == "open":
        yield s._replace(link="broken", up=(), down=()), False
        # Killed: its memory is gone, and with it its end of the connection.
        killed = s._replace(block=GARBAGE, offer=0, given_back=True, serve=None, last_word="")
        yield killed._replace(dead=True, pack="", link="broken", up=(), down=()), False
    for i, slot in enumerate(s.slots):
        if slot.state == "granted" and slot.content not in (GARBAGE, BAD):
            yield _with_slot(s, i, content=BAD), False


def _begin(s: State, wanted: int) -> Iterator[State]:
    for i, slot in enumerate(s.slots):
        if slot.state == "free":
            fetch = s.started + 1
            began = s._replace(fetch=fetch, wanted=wanted, started=fetch)
            began = _with_slot(began, i, state="granted", fetch=fetch)
            yield _say_up(began, "FETCH", fetch, wanted, i)
            return


def _producer(s: State, without: str) -> Iterator[State]:
    if s.dead:
        yield s._replace(dead=False)
        return
    if s.offer:  # the lease runs out, or the owner withdraws
        ended = s._replace(offer=0)
        yield ended._replace(last_word=s.last_word or "REFUSED") if s.serve else ended
    if not s.offer and not s.given_back and (s.pack != "reading" or without == "reading"):
        yield s._replace(given_back=True, block=GARBAGE)  # and overwritten at once
    if s.serve is not None:
        yield from _serving(s, *s.serve, without)
    if s.link == "broken" and s.pack not in ("reading", "written"):
        # It finds out, and lets go only when none of its threads writes any more.
        yield s._replace(serve=None, last_word="", pack="", link="fenced")
    if s.link == "open" and s.up:
        yield from _hear(s._replace(up=s.up[1:]), s.up[0], without)


def _serving(s: State, fetch: int, generation: int, slot: int, without: str) -> Iterator[State]:
    if not s.last_word and not s.pack and s.offer:
        yield s._replace(pack="reading")
    if s.pack == "reading":
        written = _with_slot(s._replace(pack="written"), slot, content=s.block)
        if s.given_back:
            written = written._replace(wrong="a block was read after it had been given back")
        elif s.slots[slot].state == "free" or s.slots[slot].fetch != fetch:
            written = written._replace(wrong="a slot was written after it had been given back")
        yield written
    if s.pack == "written":
        committed = s._replace(pack="committed")
        yield _say_down(committed, "COMMIT", fetch, generation, slot, s.block)
    if s.last_word and s.pack not in ("reading", "written"):
        over = s._replace(serve=None, last_word="", pack="")
        yield _say_down(over, s.last_word, fetch)
    elif s.last_word and without == "promise":
        yield _say_down(s._replace(last_word=""), s.last_word, fetch)


def _hear(s: State, message: Message, without: str) -> Iterator[State]:
    kind, fetch, generation, slot, _ = message
    if kind == "FETCH":
        if s.serve is not None:
            return  # one at a time: it waits
        if s.offer and (s.offer == generation or without == "generation"):
            yield s._replace(serve=(fetch, generation, slot))
        else:
            yield _say_down(s, "REFUSED", fetch)
    elif s.serve is None or s.serve[0] != fetch:
        yield _say_down(s, "CANCELLED", fetch) if kind == "CANCEL" else s
    elif kind == "CANCEL":
        yield s._replace(last_word="CANCELLED")
    else:  # DONE
        yield s._replace(serve=None, last_word="", pack="", offer=0)


def _consumer(s: State, without: str) -> Iterator[State]:
    if s.fetch and without != "deadline":  # it passes, or the caller cancels
        yield _give_up(s, without)
    if s.link == "broken" and s.fetch and without != "deadline":
        lost = _release(s, s.fetch, "quarantined")._replace(fetch=0)
        yield _release(lost, s.fetch, "free") if without == "fence" else lost
    if s.link in ("fenced", "broken") and (s.link == "fenced" or s.dead) and not s.fetch:
        slots = tuple(slot._replace(state="free") for slot in s.slots)
        yield s._replace(slots=slots, link="closed")
    if s.link == "fenced" and s.fetch and without != "deadline":
        yield s._replace(fetch=0)
    if s.link == "closed" and not s.dead:  # dialled again
        yield s._replace(link="open")
    if s.link == "open" and s.down:
        (kind, fetch, generation, i, content), rest = s.down[0], s._replace(down=s.down[1:])
        if kind == "COMMIT":
            ours = s.slots[i].state == "granted" and s.slots[i].fetch == fetch == s.fetch
            if ours or (without == "fetch id" and s.fetch):
                yield _unpack(rest, generation, i, content, without)
            else:
                yield rest
        else:
            if without != "refusal" or kind != "REFUSED":
                rest = _release(rest, fetch, "free")
            yield rest._replace(fetch=0) if rest.fetch == fetch else rest


def _give_up(s: State, without: str) -> State:
    over = _release(s, s.fetch, "free" if without == "quarantine" else "quarantined")
    return _say_up(over._replace(fetch=0), "CANCEL", s.fetch)


def _unpack(s: State, generation: int, i: int, content: int, without: str) -> State:
    # The digest is of what was packed, under the generation that was asked for.
    found = s.slots[i].content
    if (generation, content) != (s.wanted, found) and without not in ("digest", "fetch id"):
        return _give_up(s, without)
    s = _release(s, s.fetch, "free")
    if found != s.wanted:
        s = s._replace(wrong=f"generation {s.wanted} was asked for, {found} delivered")
    return _say_up(s._replace(fetch=0), "DONE", s.fetch)


def _with_slot(s: State, i: int, **changes: object) -> State:
    changed = s.slots[i]._replace(**changes)  # type: ignore[arg-type]
    return s._replace(slots=(changed, s.slots[1]) if i == 0 else (s.slots[0], changed))


def _release(s: State, fetch: int, state: str) -> State:
    """Change the state of a fetch's slots."""
    first, second = (
        slot._replace(state=state) if slot.fetch == fetch and slot.state != "free" else slot
        for slot in s.slots
    )
    return s._replace(slots=(first, second))


def _say_up(s: State, kind: str, fetch: int, generation: int = 0, slot: int = 0) -> State:
    if s.link != "open":
        return s
    return s._replace(up=(*s.up, (kind, fetch, generation, slot, 0)))


def _say_down(
    s: State, kind: str, fetch: int, generation: int = 0, slot: int = 0, content: int = 0
) -> State:
    if s.link != "open":
        return s
    return s._replace(down=(*s.down, (kind, fetch, generation, slot, content)))
