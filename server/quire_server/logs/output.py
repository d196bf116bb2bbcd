"""Everything that the server writes to stderr: log records, warnings, lines of child processes; written by a thread."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Condition, Thread
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import urlsplit

from quire_engine.contract.errors import ConfigError
from quire_server.logs.lines import Form, encoded, formatter_for, shown

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


FLUSH_SECONDS = 2.0
_STDERR = 2
_LAST_WORDS_SECONDS = 0.5  # time for the last lines of child processes
_LEVELLED = ("quire", "asyncio")

T = TypeVar("T")
log = logging.getLogger("quire")


class LineHandler(logging.Handler):
    """Formats records where they are made, and passes the lines to the writer."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(encoded(self.format(record)))
        except (
            Exception
        ):  # an error of the caller; the default handler would write a traceback to stderr, which may block
            self.writer.count_lost(1)


class Output:
    """The process's stderr while it serves.

    No thread that logs waits for a slow reader of stderr; the end waits for at most `FLUSH_SECONDS`. A closed stderr
    does not end the server.
    """

    def __init__(self, form: Form, descriptor: int) -> None:
        self._form = form
        self._formatter = formatter_for(form)
        self._writer = LineWriter(descriptor, self._tell_lost)
        self._relay = Relay(self._pass_on)
        self.handler = LineHandler(self._writer)
        self.handler.setFormatter(self._formatter)

    @property
    def for_children(self) -> int:
        """A descriptor for a child process's stderr."""
        return self._relay.descriptor

    def say(self, text: str) -> None:
        """Write one line that is not a log record: why the command ends."""
        self._put(logging.CRITICAL, "quire", " ".join(text.split()))

    def close(self) -> None:
        self._relay.close(_LAST_WORDS_SECONDS)
        self._writer.close(FLUSH_SECONDS)

    def _pass_on(self, text: str) -> None:
        try:
            self._put(logging.INFO, "quire.engine", text)
        except Exception:  # the thread goes on: child processes would wait for ever for a full pipe
            self._writer.count_lost(text.count("\n") + 1)

    def _put(self, level: int, logger: str, text: str) -> None:
        if self._form == "json":
            self._writer.put(encoded(self._formatter.format(_record(level, logger, text))))
        else:
            self._writer.put(b"".join(encoded(shown(line)) for line in text.split("\n")))

    def _tell_lost(self, num_lines: int) -> bytes:
        text = f"{num_lines} log lines were lost: nobody read them in time"
        return encoded(self._formatter.format(_record(logging.WARNING, "quire", text)))


@contextmanager
def writing(level: Literal["debug", "info", "warning", "error"], form: Form) -> Iterator[Output]:
    """Send every record of this process to stderr until the block ends.

    uvicorn's lines about requests, start and stop are replaced by our own, which have the request id and more details.
    """
    _occupy_standard_descriptors()
    output = Output(form, _STDERR)
    root = logging.getLogger()
    before, levels = root.handlers[:], [(each, each.level) for each in (root, *map(logging.getLogger, _LEVELLED))]
    hooks = threading.excepthook, sys.unraisablehook
    root.handlers[:] = [output.handler]
    root.setLevel(logging.WARNING)  # for third-party libraries
    logging.getLogger("quire").setLevel(level.upper())
    # asyncio reports every slow callback at debug level, with the objects' reprs.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(True)
    threading.excepthook, sys.unraisablehook = _log_of_thread, _log_unraisable
    try:
        yield output
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        output.close()
        root.handlers[:] = before
        for logger, was in levels:
            logger.setLevel(was)


def lost_lines() -> int:
    """Lines of this process that were lost so far."""
    return sum(each.writer.lost for each in logging.getLogger().handlers if isinstance(each, LineHandler))


def _record(level: int, logger: str, text: str) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": logger, "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    )


def _occupy_standard_descriptors() -> None:
    """Open missing standard descriptors; else the next socket would get such a number, and our lines."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _log_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "a thread"
        log.error("%s ended unexpectedly", name, exc_info=args.exc_value)


def _log_unraisable(args: UnraisableHookArgs) -> None:
    log.error("%s", args.err_msg or "an exception that nobody could catch", exc_info=args.exc_value)


MOST_BYTES = 1 << 20  # most bytes that wait to be written
_WRITTEN_AT_ONCE = 1 << 16  # bytes per write, the capacity of a pipe


class LineWriter:
    """Writes lines to a file descriptor in a thread, so that callers never wait for a slow reader.

    `put` from any thread; `close` once. Lines that did not fit or could not be written are counted, and their number is
    logged when writing works again.
    """

    def __init__(self, descriptor: int, tell_lost: Callable[[int], bytes], *, most_bytes: int = MOST_BYTES) -> None:
        """`tell_lost`: makes the line that reports a number of lost lines."""
        self._descriptor = descriptor
        self._tell_lost = tell_lost
        self._most_bytes = most_bytes
        self._changed = Condition()  # guards the fields below; never held during a write
        self._lines: deque[bytes] = deque()
        self._held = 0  # bytes of waiting lines and of the current write
        self._lost = 0
        self._untold = 0  # lost lines that are not reported yet
        self._closing = False
        # A daemon, so that a blocked write does not keep the process from ending.
        self._thread = Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were lost."""
        return self._lost

    def put(self, line: bytes) -> None:
        """Queue a line, which ends with a newline; it is lost if too many bytes wait."""
        with self._changed:
            if self._closing or self._held + len(line) > self._most_bytes:
                self._lose(1)
                return
            self._lines.append(line)
            self._held += len(line)
            self._changed.notify()

    def count_lost(self, num_lines: int) -> None:
        """Count lines that could not be formatted."""
        with self._changed:
            self._lose(num_lines)

    def close(self, seconds: float) -> bool:
        """Write the queued lines for at most `seconds`; True if all were written. Later lines are lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _lose(self, num_lines: int) -> None:
        self._lost += num_lines
        self._untold += num_lines

    def _run(self) -> None:
        while batch := self._take():
            is_written = self._try_to_write(b"".join, batch)
            with self._changed:
                self._held -= sum(map(len, batch))
                if not is_written:
                    self._lose(len(batch))
                    continue
                untold, self._untold = self._untold, 0
            if untold and not self._try_to_write(self._tell_lost, untold):
                with self._changed:
                    self._untold += untold

    def _try_to_write(self, make: Callable[[T], bytes], what: T) -> bool:
        """Write what `make` makes of `what`. False for any failure: this thread is the only one that could log it."""
        try:
            return self._write(make(what))
        except Exception:
            return False

    def _take(self) -> list[bytes]:
        """The next lines to write; empty when the queue is empty and closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closing)
            batch: list[bytes] = []
            size = 0
            while self._lines and size < _WRITTEN_AT_ONCE:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
            return batch

    def _write(self, data: bytes) -> bool:
        """False if the descriptor cannot be written to: the reader is gone, or the disk is full."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process has made the shared descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True


_READ_AT_ONCE = 1 << 16


class Relay:
    """Passes on what child processes write to their stderr, so that they never wait for a slow reader of the log.

    `descriptor` is for child processes; `close` once, when they have ended.
    """

    def __init__(self, pass_on: Callable[[str], None]) -> None:
        """`pass_on` gets whole lines, perhaps several at once, without the last line's end."""
        self._pass_on = pass_on
        self._source, self.descriptor = os.pipe()
        self._thread = Thread(target=self._run, name="children's stderr", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Pass on the rest, for at most `seconds` while a child process lives on."""
        os.close(self.descriptor)
        self._thread.join(seconds)

    def _run(self) -> None:
        rest = b""
        while data := os.read(self._source, _READ_AT_ONCE):
            whole, end, rest = (rest + data).rpartition(b"\n")
            if end:
                self._pass_on(whole.decode("utf-8", "replace"))
            if len(rest) >= _READ_AT_ONCE:  # too long for a line
                self._pass_on(rest.decode("utf-8", "replace"))
                rest = b""
        if rest:
            self._pass_on(rest.decode("utf-8", "replace"))
        os.close(self._source)


Signal = Literal["traces", "metrics"]
_PARTS: dict[Signal, tuple[str, ...]] = {
    "traces": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    "metrics": ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http.metric_exporter"),
}


def check_collector(signal: Signal, endpoint: str | None) -> None:
    """Raises ConfigError, one line with a remedy, if a collector is configured and impossible. Imports nothing."""
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"--otlp-{signal}-endpoint {endpoint}: {signal} are sent as OTLP over HTTP; name a URL such as"
            f" http://localhost:4318/v1/{signal}"
        )
    if not all(map(_is_there, _PARTS[signal])):
        raise ConfigError(f"--otlp-{signal}-endpoint needs OpenTelemetry: pip install 'quire[otel]', or leave it out")


def collector_url(signal: Signal, endpoint: str) -> str:
    """An address without a path gets the signal's default path, as in OTEL_EXPORTER_OTLP_ENDPOINT."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + f"/v1/{signal}"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
