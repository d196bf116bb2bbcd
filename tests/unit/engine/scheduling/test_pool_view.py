"""One picture of the pool: every block of it is where the allocator has it, and its size is bounded."""

from __future__ import annotations

import json

import pytest

from quire_engine.scheduling.log import pool_view
from support.fake_executor import Run, new_run, own_tokens, request


def view(run: Run, **arguments: int) -> dict:
    answer = run.scheduler.answer("view", arguments)
    return json.loads(
        json.dumps(answer, default=lambda record: {name: getattr(record, name) for name in record.__slots__})
    )


def test_blocks_are_used_cached_or_free():
    run = new_run(num_blocks=16, block_size=4)
    run.add(request("a", 10, 3))
    run.one_step()
    pool = view(run)["pool"]
    (table,) = pool["tables"]
    assert (table["request_id"], table["num_blocks"], table["num_computed"], table["num_prompt"]) == ("a", 3, 10, 10)
    assert (table["max_new_tokens"], table["num_tokens"]) == (3, 11)
    assert (pool["num_blocks"], pool["num_free"], pool["num_cached"]) == (16, 13, 0)
    run.to_end()
    pool = view(run)["pool"]
    assert pool["tables"] == []
    assert set(pool["cached"]) <= set(table["blocks"])
    assert len(pool["cached"]) == pool["num_cached"] > 0


def test_shared_blocks_are_in_both_tables():
    run = new_run(num_blocks=32, block_size=4)
    same = own_tokens("same", 16)
    run.add(request("a", (*same, 1), 8))
    run.one_step()
    run.add(request("b", (*same, 2), 8))
    run.one_step()
    one, other = view(run)["pool"]["tables"]
    assert one["blocks"][:4] == other["blocks"][:4]
    assert view(run)["pool"]["num_shared"] == 4


def test_who_waits_is_told_with_the_reason():
    run = new_run(max_num_seqs=1, max_num_batched_tokens=64)
    run.add(request("a", 20, 5), request("b", 10, 2))
    run.one_step()
    (waiting,) = view(run)["pool"]["waiting"]
    assert (waiting["request_id"], waiting["state"], waiting["reason"]) == ("b", "waiting", "slots")
    run.scheduler.hold("b")
    assert [(each["state"], each["reason"]) for each in view(run)["pool"]["waiting"]] == [("held", "client")]


def test_of_many_steps_the_last_ones_come_with_their_events():
    run = new_run()
    run.add(request("a", 20, 30))
    run.to_end()
    whole = view(run)
    assert whole["last"] == len(whole["steps"]) == 30
    assert [event["kind"] for event in whole["events"]] == ["submit", "end"]
    late = view(run, limit=4)
    assert [step["step_id"] for step in late["steps"]] == [27, 28, 29, 30]
    assert view(run, after=28)["steps"][0]["step_id"] == 29
    assert view(run, after=30)["steps"] == []


def test_a_picture_changes_nothing_and_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_view, "MOST_BLOCKS", 8)
    monkeypatch.setattr(pool_view, "MOST_TABLES", 2)
    monkeypatch.setattr(pool_view, "MOST_WAITING", 1)
    run, twin = new_run(num_blocks=64, block_size=4), new_run(num_blocks=64, block_size=4)
    for each in (run, twin):
        each.add(*[request(str(number), 12, 6) for number in range(12)])
    while run.scheduler.has_work:
        run.one_step()
        twin.one_step()
        pool = view(run)["pool"]
        assert pool["shown"] == 8
        assert all(block < 8 for table in pool["tables"] for block in table["blocks"])
        assert len(pool["tables"]) <= 2
        assert len(pool["waiting"]) <= 1
    assert [batch.items for batch in run.executor.log] == [batch.items for batch in twin.executor.log]
