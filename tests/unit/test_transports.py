"""What kvxfer says about its transports."""

from __future__ import annotations

import pytest

import kvxfer


def test_all_are_listed_with_a_reason() -> None:
    found = kvxfer.transports()
    assert list(found) == ["loopback", "shm", "tcp", "verbs", "ucx"]
    for name, transport in found.items():
        assert transport.name == name
        assert transport.why
    assert found["loopback"].available
    assert found["shm"].available
    assert found["tcp"].available


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(kvxfer.ConfigError, match=r"'carrier-pigeon'.*kvxfer.transports\(\)"):
        kvxfer.Config(transport="carrier-pigeon")


def test_one_that_is_not_here_is_refused() -> None:
    for name, transport in kvxfer.transports().items():
        if not transport.available:
            with pytest.raises(kvxfer.ConfigError, match=name):
                kvxfer.Config(transport=name)


def test_no_transport_in_common() -> None:
    with (
        kvxfer.Agent("prefill", listen="127.0.0.1:0", transport="tcp") as prefill,
        kvxfer.Agent("decode", transport="shm") as decode,
        pytest.raises(
            kvxfer.HandshakeError, match="no transport in common: the consumer allows shm.* tcp"
        ),
    ):
        decode.connect("prefill", prefill.address)


@pytest.mark.parametrize(
    ("ours", "theirs", "taken"),
    [
        ("auto", "auto", "shm"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
        ("shm", "auto", "shm"),
    ],
)
def test_what_auto_takes_and_why(ours: str, theirs: str, taken: str) -> None:
    from kvtest.agents import LONG
    from kvtest.caches import Geometry, Paged

    with (
        kvxfer.Agent("prefill", listen="127.0.0.1:0", transport=theirs) as prefill,
        kvxfer.Agent("decode", transport=ours) as decode,
    ):
        source, target = Paged(Geometry(), seed=1), Paged(Geometry())
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, [0], 16)
        fetch = decode.fetch(offer.ticket, target.cache, [1])
        fetch.wait(LONG)
        assert fetch.report.transport == taken
        reason = "run on one host" if taken == "shm" else "set to tcp"
        assert reason in fetch.report.why


def test_loopback_is_for_one_process() -> None:
    for listen, transport in [("127.0.0.1:0", "loopback"), ("loopback:", "tcp")]:
        with pytest.raises(kvxfer.ConfigError, match="for agents of one process"):
            kvxfer.Agent("prefill", listen=listen, transport=transport)
