"""Usage: requests and tokens by day of UTC, tenant and model, for two months, in a file where the operator names one.

Promises: each token is counted once, whatever restarts the engine; the file is replaced whole, so that no kill leaves
half of one.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Literal

import msgspec

from quire_engine.contract.errors import ConfigError
from quire_engine.plain_files import read_plain

KEPT_DAYS = 62  # this month and the one before
SAVE_SECONDS = 5.0  # a server that is killed loses the counts of this time at most
_DAY_SECONDS = 86_400

log = logging.getLogger("quire.usage")


class Counts(msgspec.Struct):
    """Counts of one tenant and model on one day. Cached tokens are a part of the prompt tokens."""

    requests: int = 0  # accepted prompts
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class UsageRow(Counts):
    """The counts with what they are of."""

    day: str = ""  # of UTC, as in 2026-01-31
    tenant: str = ""
    model: str = ""


Days = dict[str, dict[str, dict[str, Counts]]]  # by day, tenant and model


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a usage file."""

    since: str  # when the counts began, in ISO 8601
    days: Days
    format: Literal[1] = 1


class UsageBook:
    """The counts of one server. Used on the event loop's thread; `save` may run in another."""

    def __init__(self, model: str = "", *, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Go on with the counts of the file, if there is one. `clock`: seconds since the epoch.

        Raises ConfigError for a file that is not of this format, cannot be written, or is another server's.
        """
        self._model = model
        self._file = file
        self._clock = clock
        self._since = utc(clock()).isoformat(timespec="seconds")
        self._days: Days = {}
        self._today: dict[str, Counts] = {}  # those of the present day and model, by tenant
        self._day_number = -1
        self._changed = True
        self._failing = False
        self._whole = self  # the book of the file, where this is a part of it
        self._writing = Lock()
        self._lock_file = -1
        if file is not None:
            self._open(file)

    def beside(self, model: str) -> UsageBook:
        """The book of another model of the same server: its counts are in this one's days and file."""
        other = UsageBook(model, clock=self._clock)
        other._since, other._days, other._whole = self._since, self._days, self
        return other

    @property
    def since(self) -> str:
        """The time at which the counts began, in ISO 8601."""
        return self._since

    @property
    def survives_restart(self) -> bool:
        """Whether the counts are kept in a file."""
        return self._whole._file is not None

    @property
    def now(self) -> datetime:
        """The time of UTC on this book's clock."""
        return utc(self._clock())

    @property
    def today(self) -> date:
        """The day of UTC on this book's clock."""
        return self.now.date()

    def add(self, tenant: str, *, requests: int = 0, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        """Count for a tenant, on the present day."""
        number = int(self._clock() // _DAY_SECONDS)
        if number != self._day_number:
            self._begin(number)
        counts = self._today.get(tenant)
        if counts is None:
            day = self._days.setdefault(utc(number * _DAY_SECONDS).date().isoformat(), {})
            counts = self._today[tenant] = day.setdefault(tenant, {}).setdefault(self._model, Counts())
        counts.requests += requests
        counts.prompt_tokens += prompt
        counts.cached_tokens += cached
        counts.output_tokens += output
        self._whole._changed = True

    def tokens(self, tenant: str, since: date) -> int:
        """Prompt and output tokens of a tenant from a day on."""
        first = since.isoformat()
        return sum(
            counts.prompt_tokens + counts.output_tokens
            for day, tenants in self._days.items()
            if day >= first
            for counts in tenants.get(tenant, {}).values()
        )

    def by_day(self, tenant: str | None = None, day: str | None = None) -> Iterator[list[UsageRow]]:
        """The counts of each day, the latest first: of all tenants or of one, of all days or of one."""
        for each in sorted(self._days, reverse=True):
            if day in {None, each}:
                yield [
                    UsageRow(**msgspec.structs.asdict(counts), day=each, tenant=name, model=model)
                    for name, models in sorted(self._days.get(each, {}).items())
                    if tenant in {None, name}
                    for model, counts in models.items()
                ]

    async def keep(self) -> None:
        """Write the file every few seconds in which something was counted, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Write the file if something has changed. A failure is logged once, and the next call tries again."""
        try:
            self._write()
        except OSError as error:
            self._changed = True
            if not self._failing:
                log.warning("usage_file %s: cannot be written: %s; counts go on", self._file, error.strerror or error)
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        """Write the file a last time and leave it to another server."""
        self.save()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _begin(self, number: int) -> None:
        self._day_number, self._today = number, {}
        day = utc(number * _DAY_SECONDS).date()
        oldest = (day - timedelta(days=KEPT_DAYS - 1)).isoformat()
        for each in [each for each in self._days if each < oldest]:
            del self._days[each]

    def _open(self, file: Path) -> None:
        try:
            # A file that is replaced cannot be locked itself.
            self._lock_file = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists():
                stored = msgspec.json.decode(read_plain(file), type=_Stored)
                self._since, self._days = stored.since, stored.days
            self._write()
        except BlockingIOError:
            self._refuse("another server counts in it; give each server a file of its own")
        except OSError as error:
            self._refuse(f"cannot be read and written: {error.strerror or error}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._refuse(f"is no file of counts: {error}; move it away to begin anew")

    def _refuse(self, why: str) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
        raise ConfigError(f"usage_file {self._file}: {why}") from None

    def _write(self) -> None:
        if self._file is None or not self._changed:
            return
        with self._writing:
            self._changed = False
            # One call into C that does not let other threads run, so nothing is counted meanwhile.
            content = msgspec.json.encode(_Stored(since=self._since, days=self._days))
            new = self._file.with_name(f"{self._file.name}.new")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as written:
                written.write(content)
                written.flush()
                os.fsync(written.fileno())
            new.replace(self._file)


def utc(seconds: float) -> datetime:
    """The time of UTC, from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)
