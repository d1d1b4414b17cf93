"""The direct path: adapters read the blocks of an offer and write those of a fetch by themselves.

A producer has one block, which it offers under one generation after the other. A consumer has one,
too, into which it fetches twice, one chunk each. The fetch names the key under which its cache is
registered. A write is posted; later the producer's adapter reads the block, once or several times;
what it sent is on its way, and lands some time, with the COMMIT behind it; later still it is
acknowledged. Messages have a connection of their own, and may come before or after. It may break
while queue pairs still work; then each side notices, and destroys its own. The producer's host may
die without a word, and what it has sent still lands; the consumer's process may die; and a producer
may write what nobody asked for, which it can wherever a key allows it, and nowhere else.

There are two rails. When the first is lost, the producer destroys its queue pair and asks; the
consumer destroys its own, and says what has landed; the rest is sent over the second.

Nothing may be written in blocks that were given back to their owner, or in memory that is not
registered any more; no adapter may read an offer's block after it was given back; and as in
`machine`, no fetch ends well with other bytes, and nothing lasts for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from faults.model.visit import visit

FETCHES = 2  # one is enough to see what goes wrong without a rule
GENERATIONS = 2
GARBAGE, BAD = 0, -1

MUTANTS = {
    "fence": "a cancelled fetch's block is given back at once",
    "queue pair": "the end of a connection gives blocks back before the queue pair is destroyed",
    "credit": "the producer writes when it has accepted, without a credit",
    "promise": "CANCELLED is said before the adapter has acknowledged",
    "reading": "an offer's block is given back before the adapter has acknowledged",
    "flush": "a lost connection ends serving before the queue pair is destroyed",
    "generation": "the producer serves whatever it holds",
    "digest": "the digest is not compared",
    "keys": "memory that is unregistered keeps its key",
    "silence": "the consumer waits for a producer's word however long",
    "deadline": "a fetch waits for its producer however long",
    "landed": "what a lost rail carried is sent again without asking whether it has landed",
    "first rail": "what has landed is said before the lost rail's queue pair is destroyed",
}

Message = tuple[str, int, int, int]  # kind, fetch, generation, key


class Packet(NamedTuple):
    """What an adapter has sent."""

    fetch: int  # 0: nobody asked for it
    generation: int
    key: int
    digest: int  # the content when it was posted
    content: int
    rail: int


class State(NamedTuple):
    # Producer.
    block: int = GARBAGE  # the generation of what it holds
    offer: int = 0  # open under this generation; 0: none
    offered: int = 0
    given_back: bool = True
    serve: Message | None = None  # the FETCH
    credit: bool = False
    last_word: str = ""  # that is still to be said; "DONE": none
    post: str = ""  # posted, sent, acknowledged
    rail: int = 0  # of the post
    digest: int = GARBAGE  # of the block when it was posted
    key: int = 0  # that it was told last
    # Consumer.
    target: int = GARBAGE  # what its block holds
    fetch: int = 0  # that has the block; 0: its owner has it
    wanted: int = 0
    stage: str = ""  # of the fetch: asked, exposed, fenced
    started: int = 0
    registered: int = 0  # the key; 0: the memory may be anybody's
    keys: int = 0  # that there were
    # Between them.
    up: tuple[Message, ...] = ()  # to the producer
    down: tuple[Message, ...] = ()
    packets: tuple[Packet, ...] = ()
    landed: int = (
        0  # the rail on which the posted write has: its queue pair takes it no second time
    )
    lost: str = ""  # the first rail: asked, answered, over
    commits: tuple[Packet, ...] = ()
    broken: bool = False  # no messages pass
    dead: bool = False  # the producer's host
    closing: bool = False  # the consumer has noticed
    ends: tuple[bool, bool] = (True, True)  # the producer's queue pair, the consumer's
    wrong: str = ""


def explore(without: str = "") -> tuple[int, str]:
    """Visit all states. Returns how many there are, and what is wrong: "" for nothing."""
    return visit(State(), lambda state: steps(state, without), at_rest)


def at_rest(s: State) -> bool:
    return s.fetch == 0 and s.serve is None and s.given_back


def steps(s: State, without: str) -> Iterator[tuple[State, bool]]:
    """All that can happen next, and whether by itself: accidents and wishes do not."""
    for following in (*_producer(s, without), *_adapters(s, without), *_consumer(s, without)):
        yield following, True
    if s.ends == (False, False) and s.serve is None and s.fetch == 0:  # dialled again
        again = s._replace(ends=(True, True), broken=False, dead=False, closing=False, lost="")
        yield again._replace(up=(), down=()), True
    if not s.offer and s.given_back and s.offered < GENERATIONS and not s.dead:
        new = s.offered + 1
        yield s._replace(block=new, offer=new, offered=new, given_back=False), False
    usable = s.ends[1] and not s.broken and not s.closing
    if s.fetch == 0 and s.started < (1 if without else FETCHES) and usable:
        key, fetch = s.registered or s.keys + 1, s.started + 1
        for wanted in range(1, GENERATIONS + 1):
            began = s._replace(fetch=fetch, started=fetch, wanted=wanted, stage="asked")
            began = began._replace(registered=key, keys=max(s.keys, key))
            yield _up(began, "FETCH", fetch, wanted, key), False
    if s.fetch == 0 and s.registered:
        yield s._replace(registered=0), False
    if not s.broken:
        yield s._replace(broken=True, up=(), down=()), False
    if not s.dead:  # without a word
        gone = s._replace(dead=True, ends=(False, s.ends[1]), offer=0, given_back=True, up=())
        yield _forget_serve(gone)._replace(block=GARBAGE, key=0), False
    if s.ends[1]:  # the consumer dies
        gone = s._replace(broken=True, up=(), down=(), closing=True)
        yield _destroy(gone), False
    if s.post == "sent" and _sends(s):  # a packet was lost, or its acknowledgement
        yield _send(s), False
    if s.ends[0] and s.key and not s.packets:
        yield s._replace(packets=(Packet(0, 0, s.key, 0, BAD, 2),)), False
    if s.ends[0] and not s.lost and s.post:  # before there is a post it changes nothing
        yield s._replace(lost="asked"), False


def _producer(s: State, without: str) -> Iterator[State]:
    if s.dead:
        return
    if s.offer:  # the lease runs out, or the owner withdraws
        ended = s._replace(offer=0)
        yield ended._replace(last_word=s.last_word or "REFUSED") if s.serve else ended
    under_way = s.serve is not None and s.post in ("posted", "sent")
    if not s.offer and not s.given_back and (not under_way or without == "reading"):
        yield s._replace(given_back=True, block=GARBAGE)  # and overwritten at once
    if s.serve is not None:
        _, fetch, _, _ = s.serve
        if s.offer and not s.last_word and not s.post and (s.credit or without == "credit"):
            yield s._replace(post="posted", digest=s.block, rail=2 if s.lost else 1)
        if s.last_word and not under_way:
            yield _down(_forget_serve(s), s.last_word, fetch)
        elif s.last_word == "CANCELLED" and without == "promise":
            yield _down(s._replace(last_word="DONE"), s.last_word, fetch)
    if s.ends[0] and (s.broken or not s.ends[1]):
        if without == "flush":
            yield s._replace(serve=None)
        yield _forget_serve(s)._replace(ends=(False, s.ends[1]), key=0)
    if s.up and s.ends[0]:
        yield from _hear(s._replace(up=s.up[1:]), s.up[0], without)


def _hear(s: State, message: Message, without: str) -> Iterator[State]:
    kind, fetch, generation, key = message
    ours = s.serve is not None and s.serve[1] == fetch
    if kind == "FETCH":
        if s.serve is not None:
            return  # one at a time: it waits
        s = s._replace(key=key)
        if s.offer and (s.offer == generation or without == "generation"):
            yield _down(s._replace(serve=message), "ACCEPT", fetch)
        else:
            yield _down(s, "REFUSED", fetch)
    elif kind == "CANCEL":
        yield s._replace(last_word="CANCELLED") if ours else _down(s, "CANCELLED", fetch)
    elif not ours or s.last_word:
        yield s
    elif kind == "CREDIT":
        yield s._replace(credit=True)
    else:
        yield s._replace(last_word="DONE", offer=0)


def _adapters(s: State, without: str) -> Iterator[State]:
    if s.post == "posted" and _sends(s):
        yield _send(s)
    for i, packet in enumerate(s.packets):
        yield _land(s._replace(packets=s.packets[:i] + s.packets[i + 1 :]), packet, without)
    if s.post == "sent" and _sends(s) and s.landed == s.rail:
        yield s._replace(post="acknowledged")
    waits = s.rail == 1 and s.post in ("posted", "sent")
    if s.lost == "asked" and s.ends == (True, True) and not s.broken:
        closed = s._replace(lost="answered")
        if without != "first rail":
            closed = closed._replace(packets=tuple(p for p in s.packets if p.rail == 2))
        yield closed
    if s.lost == "asked" and waits and without == "landed":
        yield s._replace(post="posted", rail=2)
    if s.lost == "answered" and s.ends[0] and not s.broken:
        over = s._replace(lost="over")
        if waits:
            over = (
                over._replace(post="acknowledged")
                if s.landed
                else over._replace(post="posted", rail=2)
            )
        yield over


def _sends(s: State) -> bool:
    return s.ends[0] and (s.rail == 2 or not s.lost)


def _send(s: State) -> State:
    if s.given_back:
        return s._replace(wrong="an adapter read a block that had been given back")
    sent = s._replace(post="sent")
    if s.landed == s.rail or s.serve is None:
        return sent
    _, fetch, generation, key = s.serve
    packet = Packet(fetch, generation, key, s.digest, s.block, s.rail)
    others = tuple(other for other in s.packets if other.rail != s.rail)
    return sent._replace(packets=(*others, packet))


def _land(s: State, packet: Packet, without: str) -> State:
    if not s.ends[1] or (packet.fetch and s.landed == packet.rail):
        return s
    if packet.key != s.registered and without != "keys":
        return s._replace(broken=True, up=(), down=())
    if not s.registered:
        return s._replace(wrong="memory was written that is not registered any more")
    if packet.fetch == 0:
        return s._replace(target=BAD)
    if packet.fetch != s.fetch:
        return s._replace(wrong="a block was written after it had been given back")
    return s._replace(target=packet.content, landed=packet.rail, commits=(*s.commits, packet))


def _consumer(s: State, without: str) -> Iterator[State]:
    patient = without == "deadline"
    if s.stage in ("asked", "exposed") and not patient:  # it passes, or the caller cancels
        yield _give_up(s, without)
    if s.ends[1] and not s.closing:
        silent = (s.dead or s.stage == "fenced") and without != "silence"
        if (s.broken or silent) and not (patient and s.fetch):
            at_once = s.stage == "asked" or without == "queue pair"
            lost = s._replace(closing=True)
            yield _give_back(lost) if at_once else lost._replace(stage=s.stage and "fenced")
        if s.commits:
            yield _judge(s._replace(commits=s.commits[1:]), s.commits[0], without)
        if s.down:
            yield _take(s._replace(down=s.down[1:]), s.down[0])
    if s.ends[1] and s.closing:
        yield _destroy(s)


def _give_up(s: State, without: str) -> State:
    if s.stage == "asked" or without == "fence":
        return _up(_give_back(s), "CANCEL", s.fetch)
    return _up(s._replace(stage="fenced"), "CANCEL", s.fetch)


def _judge(s: State, commit: Packet, without: str) -> State:
    if commit.fetch != s.fetch or s.stage != "exposed":
        return s  # it has ended meanwhile
    good = (commit.generation, commit.digest) == (s.wanted, s.target)
    if not good and without != "digest":
        return _up(_give_back(s), "CANCEL", s.fetch)  # nothing else was to come
    done = _up(_give_back(s), "DONE", s.fetch)
    if s.target != s.wanted:
        return done._replace(wrong=f"generation {s.wanted} was asked for, {s.target} delivered")
    return done


def _take(s: State, message: Message) -> State:
    kind, fetch, _, _ = message
    if fetch != s.fetch:
        return s
    if kind == "ACCEPT":
        return _up(s._replace(stage="exposed"), "CREDIT", fetch) if s.stage == "asked" else s
    return _give_back(s)  # neither CANCELLED nor REFUSED is said before all is over


def _destroy(s: State) -> State:
    """Nothing lands any more, and the keys of the connection end."""
    gone = _give_back(s)._replace(ends=(s.ends[0], False), registered=0)
    return gone._replace(packets=(), commits=())


def _give_back(s: State) -> State:
    return s._replace(fetch=0, wanted=0, stage="", target=GARBAGE)


def _forget_serve(s: State) -> State:
    return s._replace(
        serve=None, credit=False, last_word="", post="", rail=0, digest=GARBAGE, landed=0
    )


def _up(s: State, kind: str, fetch: int, generation: int = 0, key: int = 0) -> State:
    if s.broken or s.dead:
        return s
    return s._replace(up=(*s.up, (kind, fetch, generation, key)))


def _down(s: State, kind: str, fetch: int) -> State:
    if s.broken or kind == "DONE":
        return s
    return s._replace(down=(*s.down, (kind, fetch, 0, 0)))
