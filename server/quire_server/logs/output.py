"""Everything that the server process has to say, on its stderr.

Owns the writer and what feeds it: log records, warnings, what threads and finalizers raise, children. Promises: nobody
waits for who reads it, at the end no longer than `FLUSH_SECONDS`; a stderr that is closed is no reason to end.
Must not know: who logs what.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from quire_server.logs.lines import Form, encoded, formatter_for, shown
from quire_server.logs.relay import Relay
from quire_server.logs.writer import LineWriter

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

FLUSH_SECONDS = 2.0
_STDERR = 2
_LAST_WORDS_SECONDS = 0.5  # of children
_LEVELLED = ("quire", "asyncio")

log = logging.getLogger("quire")


class LineHandler(logging.Handler):
    """Records become lines where they are made, and are written elsewhere."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(encoded(self.format(record)))
        except Exception:  # a fault of a call site's; logging's own way is a traceback on stderr, which may block
            self.writer.count_lost(1)


class Output:
    """The process's stderr while it serves."""

    def __init__(self, form: Form, descriptor: int) -> None:
        self._form = form
        self._formatter = formatter_for(form)
        self._writer = LineWriter(descriptor, self._tell_lost)
        self._relay = Relay(self._pass_on)
        self.handler = LineHandler(self._writer)
        self.handler.setFormatter(self._formatter)

    @property
    def for_children(self) -> int:
        """A descriptor that a child process may have as its stderr."""
        return self._relay.descriptor

    def say(self, text: str) -> None:
        """One line that is no record: why the command ends."""
        self._put(logging.CRITICAL, "quire", " ".join(text.split()))

    def close(self) -> None:
        self._relay.close(_LAST_WORDS_SECONDS)
        self._writer.close(FLUSH_SECONDS)

    def _pass_on(self, text: str) -> None:
        self._put(logging.INFO, "quire.engine", text)

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
    """Send every record of this process to stderr, until the block ends.

    Lines of uvicorn are ours: those on requests carry the request id, those on the start and the end say more.
    """
    _occupy_standard_descriptors()
    output = Output(form, _STDERR)
    root = logging.getLogger()
    before, levels = root.handlers[:], [(each, each.level) for each in (root, *map(logging.getLogger, _LEVELLED))]
    hooks = threading.excepthook, sys.unraisablehook
    root.handlers[:] = [output.handler]
    root.setLevel(logging.WARNING)  # other people's libraries
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
    """Of what this process wanted to say, since it began to."""
    return sum(each.writer.lost for each in logging.getLogger().handlers if isinstance(each, LineHandler))


def _record(level: int, logger: str, text: str) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": logger, "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    )


def _occupy_standard_descriptors() -> None:
    """A process may be started with some of them closed: the next socket would get the number, and our lines."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _log_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "a thread"
        log.error("%s ended unexpectedly", name, exc_info=args.exc_value)


def _log_unraisable(args: UnraisableHookArgs) -> None:
    log.error("%s", args.err_msg or "an exception that nobody could catch", exc_info=args.exc_value)
