"""Inputs of new batches are checked beside the lines that run, owner by owner."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from quire_server import background
from quire_server.batches import checking, runner
from quire_server.batches.records import INPUT, Batch, Owner, StoredFile, new_batch_id
from quire_server.batches.runner import Answer, BatchRunner, Server
from quire_server.batches.store import BatchStore

pytestmark = pytest.mark.anyio

ENDPOINT = "/v1/completions"


def added(store: BatchStore, owner: str, *, num_lines: int, is_good: bool = True) -> str:
    """A new batch; a wrong one has its fault in the last line."""
    methods = ["POST"] * (num_lines - 1) + ["POST" if is_good else "GET"]
    lines = [
        json.dumps({"custom_id": f"l{number}", "method": method, "url": ENDPOINT, "body": {"prompt": "x"}})
        for number, method in enumerate(methods)
    ]
    content = "\n".join(lines).encode()
    file_id, target = store.new_content()
    target.write(content)
    now = store.now()
    file = StoredFile(id=file_id, owner=owner, name="in", purpose=INPUT, num_bytes=len(content), created_at=now)
    assert store.add_file(file, target)
    batch = Batch(
        id=new_batch_id(),
        owner=Owner(name=owner),
        endpoint=ENDPOINT,
        input_file=file_id,
        window="24h",
        metadata=None,
        status="validating",
        created_at=now,
        expires_at=now + 86_400,
        times={},
    )
    assert store.add_batch(batch, most_unfinished=100)
    return batch.id


async def _send(_owner: Owner, _endpoint: str, _body: bytes) -> Answer:
    return Answer(status=200, body=b"{}", request_id="r")


def runner_of(store: BatchStore) -> BatchRunner:
    server = Server(
        send=_send,
        num_seats=lambda: 4,
        least_seats=lambda: 4,
        is_live=lambda: False,
        is_draining=lambda: False,
        knows_model=lambda _: True,
        max_line_bytes=1 << 16,
    )
    return BatchRunner(store, server)


async def test_one_owners_wrong_batches_hold_up_no_others_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "TURN_SECONDS", 0.0)  # a line each turn
    store = BatchStore(tmp_path)
    wrong = [added(store, "many", num_lines=200, is_good=False) for _ in range(20)]
    good = added(store, "one", num_lines=6)
    running = asyncio.create_task(runner_of(store).run())
    try:
        async with asyncio.timeout(300):
            while (found := await store.run(store.batch, good)) is None or found.status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert found.completed == 6
        statuses = [(await store.run(store.batch, each)).status for each in wrong]
        assert statuses.count("validating") > 10, "the checks of the others go on behind it"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        store.close()


async def test_a_batch_that_was_checked_is_not_checked_again(tmp_path: Path) -> None:
    """The runner may ask for it by a record that it has read before the check's end."""
    store = BatchStore(tmp_path)
    batch_id = added(store, "one", num_lines=3)
    old = store.batch(batch_id)
    assert old is not None
    ends = asyncio.Queue[None]()
    checks = checking.InputChecks(
        store, max_line_bytes=1 << 16, knows_model=lambda _: True, on_end=lambda: ends.put_nowait(None)
    )
    running = asyncio.create_task(checks.run())
    try:
        async with asyncio.timeout(300):
            checks.add(old)
            await ends.get()
            checks.add(old)
            checks.add(store.batch(added(store, "one", num_lines=1)) or old)
            await ends.get()
        found = await store.run(store.batch, batch_id)
        assert found is not None
        assert (found.status, found.total) == ("in_progress", 3)
        assert len(await store.run(lambda: store.open_lines(batch_id, after=0, limit=9))) == 3
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        store.close()


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database or disk is full"), RuntimeError("planted")])
async def test_a_check_whose_end_cannot_be_kept_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Else no input of anybody would be checked until the next start."""
    for module in (checking, runner, background):
        monkeypatch.setattr(module, "PAUSE_SECONDS" if module is background else "TROUBLE_SECONDS", 0.01)
    store = BatchStore(tmp_path)
    batches = [added(store, "one", num_lines=2), added(store, "two", num_lines=2)]
    begin, errors = store.begin, [error]

    def full_at_first(batch_id: str, *, model: str | None) -> None:
        if errors:
            raise errors.pop()
        begin(batch_id, model=model)

    monkeypatch.setattr(store, "begin", full_at_first)
    running = asyncio.create_task(runner_of(store).run())
    try:
        async with asyncio.timeout(300):
            while {(await store.run(store.batch, each)).status for each in batches} - {"completed", "failed"}:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        statuses = [(await store.run(store.batch, each)).status for each in batches]
        assert sorted(statuses) == (["completed"] * 2 if isinstance(error, sqlite3.Error) else ["completed", "failed"])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        store.close()
