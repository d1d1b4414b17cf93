"""Where engines come from: a list given at the start, and a file that may change."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from kvxfer.errors import InvalidError

from .pool import Pool
from .settings import Entry

logger = logging.getLogger("kvxfer.gateway")


def read_entries(path: Path) -> list[Entry]:
    """Return the engines that a file names: ``{"engines": [{"url": ..., "role": ...}]}``.

    Raises
    ------
    InvalidError
        It can't be read, or names none in this way.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidError(f"can't read the engines in {path}: {error}") from error
    entries = found.get("engines") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise InvalidError(f'{path}: write {{"engines": [{{"url": ..., "role": ...}}]}}')
    read = [Entry.read(entry) for entry in entries]
    urls = [entry.url for entry in read]
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise InvalidError(f"{path} names {', '.join(sorted(twice))} twice")
    return read


class WatchedFile:
    """Makes the pool what a file says, whenever the file changes.

    A file that can't be read leaves everything as it is: half a file is what an editor writes.
    """

    def __init__(self, path: str, pool: Pool, interval: float) -> None:
        self._path, self._pool, self._interval = Path(path), pool, interval
        self._seen: tuple[int, int, int] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read the file, and again when it changes.

        Raises
        ------
        InvalidError
            It can't be read now.
        """
        self._seen = self._stamp()
        self._pool.replace(read_entries(self._path), self._source)
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        """Read it no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _source(self) -> str:
        return f"file {self._path.name}"

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            stamp = self._stamp()
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                self._pool.replace(read_entries(self._path), self._source)
                logger.info("%s was read again", self._path)
            except InvalidError as error:
                logger.warning("%s; the engines stay as they are", error)
