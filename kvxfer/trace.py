"""``kvxfer trace``: what an agent's flight recorder held, as a timeline."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer._help import manual
from kvxfer._terminal import printable
from kvxfer.telemetry import TRACE_VERSION

_PRODUCER = ("offer", "serve", "pack", "write", "commit", "refuse", "release", "expire")
_CHUNKS = ("pack", "write", "commit", "verify")


class TraceError(Exception):
    """A file that is no trace."""


@dataclass(frozen=True)
class Event:
    """One event, on the wall clock of its agent's host."""

    agent: str
    at: int
    """Nanoseconds since 1970, of its end."""
    kind: str
    request: str
    took: int = 0
    offer: str = ""
    peer: int = 0
    chunk: int | None = None
    bytes: int = 0
    status: str = ""

    @property
    def shown_at(self) -> int:
        """Where it stands in the timeline: work when it begins, ends when they are."""
        return self.at - self.took if self.kind in _CHUNKS else self.at


@dataclass
class TraceFile:
    """What one file holds."""

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)


@dataclass
class Row:
    """A line of the timeline: one event, or those of a request's chunks together."""

    events: list[Event]

    @property
    def first(self) -> Event:
        return self.events[0]

    def text(self, start: int, names: dict[str, str], agents: int) -> str:
        first, count = self.first, len(self.events)
        side = "prefill" if first.kind in _PRODUCER else "decode"
        details = []
        if count > 1:
            details.append(f"{count} chunks until {_ms(self.events[-1].at - start)}")
        elif first.chunk is not None:
            details.append(f"chunk {first.chunk}")
        nbytes = sum(event.bytes for event in self.events)
        if nbytes:
            details.append(f"{nbytes} bytes")
        took = sum(event.took for event in self.events)
        if took:
            details.append(f"{took / 1e6:.3f} ms{' of work' if count > 1 else ''}")
        if first.status:
            details.append(first.status)
        columns = [f"{_ms(first.shown_at - start):>12}"]
        if agents > 1:
            columns.append(f"{first.agent:<16}")
        columns += [f"{side:<7}", f"{first.kind:<8}", f"{names[first.request]:<24}"]
        return printable("  ".join([*columns, ", ".join(details)]).rstrip())


def _ms(nanos: int) -> str:
    return f"{nanos / 1e6:.3f} ms"


def read_trace(path: Path) -> TraceFile:
    """Read what `Agent.dump_trace` wrote.

    Raises
    ------
    TraceError
        It is something else; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: it is no text") from None
    number = 1
    try:
        header = json.loads(lines[0]) if lines else None
        if not isinstance(header, dict) or header.get("kind") != "trace":
            raise TraceError(f"{path}: its first line is not that of a trace of kvxfer")
        if header.get("version") != TRACE_VERSION:
            version = printable(header.get("version"))
            raise TraceError(f"{path}: it has version {version}, this kvxfer reads {TRACE_VERSION}")
        time.gmtime(header["unix_nanos"] // 10**9)  # is one
        found = TraceFile({**header, "agent": str(header["agent"])})
        for number, line in enumerate(lines[1:], 2):  # noqa: B007 - for the message
            found.events.append(_event(header, json.loads(line)))
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        raise TraceError(f"{path}: line {number} is no event of a trace") from None
    return found


def _event(header: dict[str, Any], record: dict[str, Any]) -> Event:
    return Event(
        agent=str(header["agent"]),
        at=int(header["unix_nanos"]) + int(record["nanos"]),
        kind=str(record["event"]),
        request=str(record["request"]),
        took=int(record.get("took", 0)),
        offer=str(record.get("offer", "")),
        peer=int(record.get("peer", 0)),
        chunk=record.get("chunk"),
        bytes=int(record.get("bytes", 0)),
        status=str(record.get("status", "")),
    )


def request_names(events: Iterable[Event]) -> dict[str, str]:
    """Return what to call each request: its offer's id, where an event that has it is left."""
    names: dict[str, str] = {}
    for event in events:
        if event.offer or event.request not in names:
            names[event.request] = event.offer or event.request
    return names


def rows(events: Sequence[Event], every: bool) -> list[Row]:
    """Return the lines of the timeline, in order; `every` chunk on one of its own, or folded."""
    found: list[Row] = []
    folded: dict[tuple[str, str, str], Row] = {}
    for event in sorted(events, key=lambda event: event.shown_at):
        key = (event.agent, event.request, event.kind)
        if event.kind in _CHUNKS and not every and key in folded:
            folded[key].events.append(event)
            continue
        found.append(Row([event]))
        folded[key] = found[-1]
    return found


def chrome_trace(files: Sequence[TraceFile], names: dict[str, str]) -> dict[str, Any]:
    """Return the events as Chrome's trace viewer and Perfetto read them.

    An agent is a process there. Events that overlap are on different threads, as viewers want it.
    """
    records: list[dict[str, Any]] = []
    for process, file in enumerate(files, 1):
        name = f"{file.header['agent']} (pid {file.header.get('pid', '?')})"
        records.append(_name(process, 0, "process_name", name))
        lanes: dict[tuple[str, str], list[int]] = {}  # until when each is taken
        threads: dict[tuple[str, str, int], int] = {}
        for event in sorted(file.events, key=lambda event: event.at - event.took):
            row = (event.request, event.kind)
            lane = _free_lane(lanes.setdefault(row, []), event)
            thread = threads.setdefault((*row, lane), len(threads) + 1)
            if thread == len(threads):
                title = f"{names[event.request]} {event.kind}"
                records.append(_name(process, thread, "thread_name", title))
            records.append(_record(event, process, thread))
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def _free_lane(taken_until: list[int], event: Event) -> int:
    for lane, until in enumerate(taken_until):
        if until <= event.at - event.took:
            taken_until[lane] = event.at
            return lane
    taken_until.append(event.at)
    return len(taken_until) - 1


def _name(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _record(event: Event, process: int, thread: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": event.kind,
        "cat": "kvxfer",
        "pid": process,
        "tid": thread,
        "ts": (event.at - event.took) / 1e3,
        "args": {"request": event.request},
    }
    for key in ("chunk", "bytes", "peer", "status"):
        value = getattr(event, key)
        if value or (key == "chunk" and value == 0):
            record["args"][key] = value
    if event.took:
        return {**record, "ph": "X", "dur": event.took / 1e3}
    return {**record, "ph": "i", "s": "t"}


def _parser() -> argparse.ArgumentParser:
    parser = manual(
        "kvxfer trace",
        "Shows what an agent's flight recorder held: a file of Agent.dump_trace(), or one that a "
        "failure left in KVXFER_TRACE_DIR. Files of both sides are put into one timeline, by their "
        "hosts' clocks.",
        more="Events of a request's chunks are shown together, with the work that they were; --all "
        "shows each. Times are milliseconds since the first event.",
        status={0: "it was shown, or written"},
        examples=[
            "kvxfer trace decode.jsonl prefill.jsonl           both sides, in one timeline",
            "kvxfer trace decode.jsonl --request req-17 --all  one request, every chunk",
            "kvxfer trace decode.jsonl --chrome out.json        for ui.perfetto.dev",
        ],
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a trace")
    parser.add_argument("--all", action="store_true", help="a line for every chunk")
    parser.add_argument(
        "--request", metavar="ID", help="only this request: an offer's id, or what stands for it"
    )
    parser.add_argument(
        "--chrome",
        type=Path,
        metavar="OUT",
        help="write JSON for chrome://tracing and ui.perfetto.dev instead",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        files = [read_trace(path) for path in options.files]
        names = request_names(event for file in files for event in file.events)
        if options.request:
            wanted = {key for key, name in names.items() if options.request in (key, name)}
            if not wanted:
                known = printable(", ".join(sorted(set(names.values()))[:8]))
                raise TraceError(f"no event is of request {options.request!r}; there are {known}")
            for file in files:
                file.events = [event for event in file.events if event.request in wanted]
        if options.chrome:
            options.chrome.write_text(json.dumps(chrome_trace(files, names)))
        else:
            _show(files, names, options.all)
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _show(files: Sequence[TraceFile], names: dict[str, str], every: bool) -> None:
    for file in files:
        head = file.header
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(head["unix_nanos"] // 10**9))
        lost = f", {head['dropped']} older ones are gone" if head.get("dropped") else ""
        who = f"{head['agent']} (pid {head.get('pid')} on {head.get('host')})"
        print(printable(f"{who}, recording since {when}: {len(file.events)} events{lost}"))
        if head.get("reason"):
            print(f"  written because: {printable(head['reason'])}")
    events = [event for file in files for event in file.events]
    if not events:
        return
    print()
    start = min(event.shown_at for event in events)
    agents = len({event.agent for event in events})
    for row in rows(events, every):
        print(row.text(start, names, agents))
