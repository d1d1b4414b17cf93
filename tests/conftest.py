"""What every test gets: a bound on how long it may hang, and settings for hypothesis."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
from kvtest import ucx

from kvxfer import _core

# A deadline per example would fail on a busy machine; pytest-timeout bounds the test as a whole.
# For the same reason, and where few inputs pass an assume(), the speed of drawing is no failure.
SPEED = [
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.filter_too_much,
    hypothesis.HealthCheck.data_too_large,
]
hypothesis.settings.register_profile("kvxfer", deadline=None, suppress_health_check=SPEED)
hypothesis.settings.register_profile(
    "ci",
    parent=hypothesis.settings.get_profile("kvxfer"),
    derandomize=True,
    database=None,
    print_blob=True,
)
hypothesis.settings.register_profile(
    "sanitize",
    parent=hypothesis.settings.get_profile("ci"),
    max_examples=15,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "kvxfer")
)

# pytest-timeout fails the test from a signal handler. That can't run while the main thread is stuck
# in native code, so behind it stands a thread that needs no interpreter: after this many more
# seconds it prints the stack of every thread and ends the process.
GRACE_SECONDS = 20.0

_stderr_fd = pytest.StashKey[int]()

# What `kvtest.fake_verbs.use` and `kvtest.ucx.use` set; later files would find adapters too, and
# only some of UCX's transports.
_before = {name: os.environ.get(name) for name in ("KVXFER_VERBS_LIBRARY", *ucx.SETTINGS)}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr_fd] = os.dup(2)  # before pytest captures it
    # Ignored in what a shell starts in the background, and then in all that tests start, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    wanted = os.environ.get("KVXFER_EXPECT_SANITIZE")
    found = _core.build_info()["sanitize"]
    if wanted is not None and found != wanted:
        raise pytest.UsageError(
            f"the tests should run with the sanitizers {wanted!r}, but {_core.__file__} was built "
            f"with {found!r}"
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr_fd])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    if limit > 0:
        faulthandler.dump_traceback_later(
            limit + GRACE_SECONDS, exit=True, file=item.config.stash[_stderr_fd]
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if nextitem is None or nextitem.path != item.path:
            for name, value in _before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
