"""Runs `quire run-batch`: an engine, the server's own routes without a listener, and one batch over them.

Promises: every line of the input has one line in the output, in the same order; a run that has not ended goes on where
it was when the same command is given again. Every failure is one line and an exit code.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire_engine.contract.errors import ConfigError
from quire_server.app import create_app
from quire_server.batches.records import INPUT, Batch, Owner, StoredFile, new_batch_id
from quire_server.batches.store import BatchStore
from quire_server.checkpoint.locate import localized
from quire_server.flags import CommandLine
from quire_server.http.event_loop import loop_factory
from quire_server.logs import Output
from quire_server.programs.launch import BAD_USAGE, DONE, FAILED, engines_of, run_program
from quire_server.programs.stopping import stop_signals
from quire_server.settings import ServerLimits, Settings
from quire_server.settings.keys import Keys
from quire_server.showing import loading
from quire_server.showing.loading import answered_lines
from quire_server.state import build_state

NAME = "quire run-batch"
_WINDOW = 10 * 365 * 86_400  # seconds: it does not expire
_LOOK_SECONDS = 0.2
_COPIED = 1 << 20

log = logging.getLogger("quire.batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    input: Path
    output: Path

    @property
    def state(self) -> Path:
        """The folder of a run that has not ended, beside its output."""
        return self.output.with_name(self.output.name + ".state")


def run(given: CommandLine, source: Path, target: Path) -> int:
    """Answer the lines of `source` in `target`; the process's exit code."""
    files = _Files(input=source, output=target)

    def body(settings: Settings, output: Output) -> int:
        # The lines are requests of this program's own, for which no key, tenant or host name is checked.
        own = {"api_key": (), "tenants": None, "first_keys": Keys(), "allowed_hosts": ("*",)}
        alone = settings.model_copy(update=own | {"batch_dir": files.state})
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_answer(localized(alone), files, output))

    return run_program(NAME, given, body)


async def _answer(settings: Settings, files: _Files, output: Output) -> int:
    with stop_signals() as stop:
        engines = engines_of(settings, output)
        starting = asyncio.create_task(engines.start())
        showing = asyncio.create_task(loading.show(lambda: engines.progress, starting, bar=loading.has_terminal()))
        running: asyncio.Task[int] | None = None
        try:
            # The output is the operator's own, however large.
            limits = ServerLimits(max_files_bytes=sys.maxsize)
            state = await build_state(settings, engines, starting, limits=limits)
            app = create_app(state)
            async with app.router.lifespan_context(app):
                running = asyncio.create_task(_run(app.state.batches.store, app.state.batches.runner.wake, files))
                await asyncio.wait((running, stop.asked, engines.dead), return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    running.cancel()
                    log.warning("ended; the same command goes on with what is in %s", files.state)
                    return FAILED
                code = running.result()
            await asyncio.to_thread(shutil.rmtree, files.state)
            return code
        finally:
            for task in filter(None, (running, showing, starting)):
                task.cancel()
            await asyncio.gather(showing, starting, *filter(None, [running]), return_exceptions=True)
            await engines.stop()


async def _run(store: BatchStore, wake: Callable[[], None], files: _Files) -> int:
    """Run the batch to its end, a new one or the one of an earlier run, and write the output."""
    batch = await store.run(_begin, store, files)
    wake()
    with answered_lines(bar=loading.has_terminal()) as show:
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(_LOOK_SECONDS)
            now = await store.run(store.batch, batch.id)
            batch = now or batch
            show(batch.completed + batch.failed, batch.total, batch.failed)
    if batch.status == "failed":
        for each in batch.problems:
            where = f"{files.input}: line {each.line}" if each.line else str(files.input)
            log.error("%s: %s", where, each.message)
        return BAD_USAGE
    await store.run(_write, store, batch, files.output)
    log.info("%d lines: %d answered, %d with errors, in %s", batch.total, batch.completed, batch.failed, files.output)
    return DONE


def _begin(store: BatchStore, files: _Files) -> Batch:
    """The batch of this input. Raises ConfigError where the folder has one of another input, and OSError."""
    digest = _digest(files.input)
    for batch in store.batches("", after=None, limit=1):
        if batch.metadata == {"sha256": digest}:
            return batch
        raise ConfigError(
            f"{files.state} has a run of another input that has not ended; delete the folder, or give another output"
        )
    file_id, content = store.new_content()
    with files.input.open("rb") as source:
        shutil.copyfileobj(source, content, _COPIED)
    num_bytes, now = content.tell(), store.now()
    file = StoredFile(id=file_id, owner="", name=files.input.name, purpose=INPUT, num_bytes=num_bytes, created_at=now)
    store.add_file(file, content)
    batch = Batch(
        id=new_batch_id(),
        owner=Owner(),
        endpoint="",
        input_file=file_id,
        window="",
        metadata={"sha256": digest},
        status="validating",
        created_at=now,
        expires_at=now + _WINDOW,
        times={},
    )
    store.add_batch(batch, most_unfinished=1)
    return batch


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(store: BatchStore, batch: Batch, output: Path) -> None:
    """Write both files of the batch as one, in the order of the input, as a whole or not at all. Raises OSError."""
    parts: list[IO[bytes]] = [
        store.content(each).open("rb") for each in (batch.output_file, batch.error_file) if each is not None
    ]
    unfinished = output.with_name(output.name + ".part")
    try:
        with unfinished.open("wb") as target:
            for result in heapq.merge(*parts, key=_number):
                target.write(result)
            target.flush()
            os.fsync(target.fileno())
        unfinished.replace(output)
    finally:
        for part in parts:
            part.close()


def _number(result: bytes) -> int:
    """The number of the line in the input, from the id that every result begins with."""
    return int(result.partition(b'","custom_id"')[0].rpartition(b"_")[2])
