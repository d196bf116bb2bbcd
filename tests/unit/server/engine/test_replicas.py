"""Several engines behind one port, with engines that do what the test says: who gets a request, and who goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import msgspec
import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import EngineStats, StepOutput, TokenOutput
from quire_engine.routing.policy import RoutePolicyName
from quire_server.engine import replica_routing
from quire_server.engine.local_replicas import divided_config
from quire_server.engine.recovery import Loss
from quire_server.engine.stats_sum import StatsSum
from quire_server.engine.supervisor import EngineState
from quire_server.errors import ReplicaLost
from support.scripted_replicas import Replicas, replicas
from support.supervising import request, run


def tokens(them: Replicas, name: str, choice: int = 0) -> list[int]:
    return them.client.tokens.get((name, choice), [])


def test_memory_and_files_that_are_named_are_for_all_together() -> None:
    divided = divided_config(EngineConfig(model="", num_threads=4, kv_memory=800, kv_offload_size=100), 2)
    assert (divided.num_threads, divided.kv_memory, divided.kv_offload_size, divided.replicas) == (2, 400, 50, 2)


def test_requests_go_to_the_replica_with_least_ahead() -> None:
    async def body() -> None:
        them = await replicas()
        for name, length in (("a", 30), ("b", 10), ("c", 10), ("d", 20)):
            them.set.submit(request(name, tuple(range(length))))
        assert [sorted(one.requests) for one in them.each] in ([["a"], ["b", "c", "d"]], [["b", "c", "d"], ["a"]])
        them.holder("a").say("a", 5)
        them.set.submit(request("e"))
        assert them.holder("e") is them.holder("a"), "whose prompt is answered is not ahead any more"

    run(body)


def test_prompts_are_hashed_for_policies_that_ask_what_caches_hold_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def names(token_ids: tuple[int, ...], salt: str, block_size: int) -> tuple[int, ...]:
        hashed.append(len(token_ids))
        return ()

    monkeypatch.setattr(replica_routing, "routed_names", names)

    async def body() -> None:
        for policy in get_args(RoutePolicyName):
            hashed.clear()
            them = await replicas(policy=policy)
            asks = policy in ("predicted_ttft", "cache_aware")
            them.set.submit(request("a", tuple(range(100))))
            assert hashed == [100] * asks, policy

    run(body)


def test_the_predicted_time_to_the_first_output_is_told_beside_the_seen_one() -> None:
    async def body() -> None:
        them = await replicas(policy="predicted_ttft")
        told: list[tuple[str, float, float]] = []
        them.set.on_answered = lambda *one: told.append(one)
        them.set.submit(request("a", tuple(range(100))))
        await asyncio.sleep(0.02)
        assert told == []
        them.holder("a").say("a", 5)
        them.holder("a").say("a", 6)
        ((name, predicted, seen),) = told
        assert name in ("0", "1")
        assert 0 < predicted < 1
        assert 0.01 < seen < 5

    run(body)


def test_why_a_request_went_where_is_told_while_it_lives_and_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the move after a loss, and in a line where its first output was much later than predicted."""
    caplog.set_level(logging.DEBUG, logger="quire.replicas")
    now = 100.0

    async def body() -> None:
        nonlocal now
        them = await replicas(policy="predicted_ttft")
        monkeypatch.setattr(them.set, "_clock", lambda: now)
        them.set.submit(request("a", tuple(range(100))))
        first = them.holder("a")
        (route,) = them.set.routes("a")
        assert (route.replica, route.reason, route.seen) == (first_name(them, first), "load", None)
        assert route.why.startswith("predicted 0.")
        assert f"request a goes to replica {route.replica} (load): predicted" in caplog.text
        assert "had its first output" not in caplog.text
        now += 7.0
        first.say("a", 5)
        assert route.seen == 7.0
        assert f"request a had its first output after 7.0 s from replica {route.replica} (load): " in caplog.text
        first.die()
        them.holder("a").say("a~1", 6, finish="length")
        assert [each.reason for each in them.set.routes("a")] == ["load", "moved"], "remembered"
        assert [each.seen for each in them.set.routes("a")] == [7.0, 0.0]
        assert them.set.routes("b") == ()

        async def explain(what: str, argument: str) -> bytes:
            asked = msgspec.json.decode(argument)["ids"]
            return msgspec.json.encode({"requests": [{"request_id": asked[0], "why": "It took 7 s."}], "step": 1})

        for each in them.each:
            monkeypatch.setattr(each, "inspect", explain)
        (told,) = msgspec.json.decode(await them.set.inspect("request", '{"ids": ["a"]}'))["requests"]
        assert [each["reason"] for each in told["routes"]] == ["load", "moved"]
        assert told["routes"][0]["seen_ttft_seconds"] == 7.0
        assert told["why"].startswith("It took 7 s; it was given to 2 replicas, last to replica ")
        assert "came after 7.0 s, 0.1 s were predicted" in told["why"]

    run(body)


def test_a_prompt_is_hashed_once_however_often_its_stream_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    hash_names = replica_routing.routed_names

    def names(token_ids: tuple[int, ...], salt: str, block_size: int) -> tuple[int, ...]:
        hashed.append(len(token_ids))
        return hash_names(token_ids, salt, block_size)

    monkeypatch.setattr(replica_routing, "routed_names", names)

    async def body() -> None:
        them = await replicas(policy="predicted_ttft")
        them.set.submit(request("a", tuple(range(100_000))))
        for _ in range(3):
            name = first_name(them, them.holder("a"))
            them.set.drain(name, draining=True)
            them.set.drain(name, draining=False)
        assert len(them.set.routes("a")) == 4
        assert hashed == [100_000]

    run(body)


def test_a_killed_replicas_streams_go_on_elsewhere_at_once_with_what_they_have() -> None:
    async def body() -> None:
        them = await replicas()
        for i, name in enumerate("abcd"):
            them.set.submit(replace(request(name, (i, i)), arrival_time=float(i)))
        for name in "abcd":
            them.holder(name).say(name, 7, 8)
        dying, left = them.each
        own = sorted(dying.requests)
        dying.die()
        moved = [frame for frame in left.connection.frames if frame.request_id.endswith("~1")]  # type: ignore[union-attr]
        assert [one.request_id.removesuffix("~1") for one in moved] == own, "the oldest first"  # type: ignore[union-attr]
        assert all(one.resumed_token_ids == ((7, 8),) for one in moved)  # type: ignore[union-attr]
        for name in own:
            left.say(f"{name}~1", 9, finish="length")
            assert tokens(them, name) == [7, 8, 9]
            assert (name, 0) in them.client.ends
        assert len(them.moved) == len(own)

    run(body)


def test_what_an_engine_says_after_it_was_given_up_is_dropped() -> None:
    """Also where the stream has come back to it meanwhile, and where the engine never ended."""

    async def body() -> None:
        them = await replicas()
        them.set.submit(request("r"))
        first = them.holder("r")
        (second,) = (one for one in them.each if one is not first)
        first.say("r", 1)
        them.set.drain(first_name(them, first), draining=True)
        assert list(first.requests) == []
        first.say("r", 2)  # was on its way
        second.say("r~1", 2)
        them.set.drain(first_name(them, first), draining=False)
        them.set.drain(first_name(them, second), draining=True)
        assert list(first.requests) == ["r~2"]
        for late in ("r", "r~1"):
            first.say(late, 3)
            second.say(late, 3)
        assert tokens(them, "r") == [1, 2]
        first.say("r~2", 3, finish="length")
        assert tokens(them, "r") == [1, 2, 3]
        assert them.set.rows()[0].streams == them.set.rows()[1].streams == 0

    run(body)


def bare(names: Iterable[str]) -> list[str]:
    """The clients' ids of what an engine has."""
    return [name.partition("~")[0] for name in names if "probe" not in name]


def first_name(them: Replicas, supervisor: object) -> str:
    return str(them.each.index(supervisor))  # type: ignore[arg-type]


def test_a_request_under_suspicion_stays_until_it_is_proven_guilty_and_meets_no_other_replica() -> None:
    async def body() -> None:
        them = await replicas(4)
        them.set.submit(request("bad", (1, 2)))
        for i in range(3):
            them.set.submit(request(f"filler{i}", tuple(range(50))))
        them.set.submit(request("good", (3, 4)))
        holder = them.holder("bad")
        assert them.holder("good") is holder, "either may be it"
        holder.die(Loss.CRASH)
        others = [one for one in them.each if one is not holder]
        assert not any("bad" in name or "good" in name for one in others for name in one.requests)
        holder.come_back()
        (suspect,) = holder.requests.keys() - {"probe-of-a-new-engine"}
        assert suspect == "bad", "one at a time, in the order of arrival"
        holder.die(Loss.CRASH)
        assert them.client.ends["bad", 0].culprit
        holder.come_back()
        holder.say("good", 4, finish="length")
        assert tokens(them, "good") == [4]
        assert not any("bad" in name for one in others for name in one.requests)

    run(body)


def test_a_request_at_the_loss_of_two_replicas_without_a_token_gets_no_third() -> None:
    async def body() -> None:
        them = await replicas(4)
        them.set.submit(request("bad"))
        them.holder("bad").die()
        second = them.holder("bad")
        second.die()
        assert not any("bad" in name for one in them.each for name in them.ids(one)), "it waits for its own replica"
        second.never_come_back()
        end = them.client.ends["bad", 0]
        assert end.culprit
        assert end.finish == "error"
        assert them.set.quarantine.refusal(request("bad"), 0.0) is not None

    run(body)


def test_kills_by_others_move_a_request_each_time_and_prove_nothing() -> None:
    async def body() -> None:
        them = await replicas(2)
        them.set.submit(request("r"))
        for _ in range(6):
            holder = them.holder("r")
            holder.die(Loss.KILL)
            assert them.holder("r") is not holder
            holder.come_back()
        them.holder("r").say(them.run_id("r"), 7)
        assert tokens(them, "r") == [7]

    run(body)


def test_a_token_between_two_losses_clears_a_request() -> None:
    async def body() -> None:
        them = await replicas(3)
        them.set.submit(request("r"))
        for epoch in range(6):
            holder = them.holder("r")
            holder.say(them.run_id("r"), epoch)
            holder.die()
            assert them.run_id("r") == f"r~{epoch + 1}"
            holder.come_back()
        assert tokens(them, "r") == list(range(6))

    run(body)


def test_streams_wait_for_a_replica_and_go_on_when_one_comes() -> None:
    async def body() -> None:
        them = await replicas()
        them.set.submit(request("old"))
        them.each[0].say("old", 1)
        them.each[0].die()
        them.each[1].say("old~1", 2)
        them.each[1].die()
        them.set.submit(request("new"))
        assert them.set.trouble() == "engine restarting"
        them.each[1].come_back()
        assert them.set.trouble() is None
        assert [name for name in them.each[1].requests if "probe" not in name] == ["old~2", "new"]

    run(body)


def test_without_a_replica_in_time_a_stream_ends_with_an_error_to_be_retried() -> None:
    async def body() -> None:
        them = await replicas(failover_seconds=0.05)
        them.set.submit(request("r", n=2))
        them.each[0].say("r", 1)
        them.each[0].die()
        them.each[1].say("r~1", 2)
        them.each[1].die()
        await asyncio.sleep(0.2)
        ends = [them.client.ends["r", choice] for choice in range(2)]
        assert {end.error_code for end in ends} == {ReplicaLost.default_code}
        assert not any(end.culprit for end in ends)
        them.each[0].come_back()
        assert not [name for name in them.each[0].requests if "probe" not in name]

    run(body)


def test_a_stream_with_tokens_stays_among_replicas_of_its_numerics() -> None:
    async def body() -> None:
        them = await replicas(3, numerics=("avx2", "amx", "avx2"), failover_seconds=0.05)
        them.set.drain("2", draining=True)
        them.set.drain("1", draining=True)
        them.set.submit(request("begun"))
        them.set.submit(request("fresh"))
        them.each[0].say("begun", 1)
        them.set.drain("1", draining=False)
        them.each[0].die()
        assert list(them.each[1].requests) == ["fresh~1"], "who has no token may go anywhere"
        them.set.drain("2", draining=False)
        assert list(them.each[2].requests) == ["begun~1"]

    run(body)


def test_a_drained_replica_keeps_its_streams_where_no_other_can_take_them() -> None:
    async def body() -> None:
        them = await replicas()
        them.set.submit(request("r"))
        holder = them.holder("r")
        (other,) = (one for one in them.each if one is not holder)
        other.die()
        row = them.set.drain(first_name(them, holder), draining=True)
        assert row is not None
        assert (row.draining, row.streams) == (True, 1)
        holder.say("r", 1)
        other.come_back()
        assert [name for name in other.requests if "probe" not in name] == ["r~1"], "as soon as one can"
        assert them.set.drain("9", draining=True) is None

    run(body)


def test_aborts_and_holds_follow_a_stream() -> None:
    async def body() -> None:
        them = await replicas()
        for name in ("held", "gone", "back"):
            them.set.submit(request(name))
            them.holder(name).say(name, 1)
        for name in ("held", "back"):
            them.set.hold_request(name)
        for one in them.each:
            one.die()
        them.set.abort("gone")
        them.set.release_request("back")
        them.each[0].come_back()
        assert bare(them.each[0].requests) == ["back"]
        them.set.release_request("held")
        assert bare(them.each[0].requests) == ["back", "held"]
        them.set.abort("back")
        assert bare(them.each[0].requests) == ["held"]

    run(body)


def test_one_dead_replica_ends_nothing_and_all_of_them_everything() -> None:
    async def body() -> None:
        them = await replicas()
        them.set.submit(request("r"))
        holder = them.holder("r")
        holder.die()
        holder.never_come_back()
        assert not them.set.dead.done()
        last = them.holder("r")
        assert last is not holder
        last.say("r~1", 1)
        last.die()
        last.never_come_back()
        assert them.set.dead.done()
        assert them.client.ends["r", 0].finish == "error"
        them.set.submit(request("late"))
        assert them.client.ends["late", 0].error == "the engine is not running"

    run(body)


def test_statistics_are_sums_that_count_nothing_twice() -> None:
    async def body() -> None:
        them = await replicas()
        seen: list[StepOutput] = []
        them.set.on_step = seen.append
        for name in ("a", "b"):
            them.set.submit(request(name))
        for one, name in zip(them.each, ("a", "b"), strict=True):
            one.say(name, 1)
        assert (seen[-1].stats.blocks_total, seen[-1].stats.total_preemptions) == (1024, 2)
        them.each[0].die()
        assert (seen[-1].stats.blocks_total, seen[-1].stats.total_preemptions) == (1024, 2), "totals never fall"
        them.each[0].come_back()
        assert seen[-1].stats.total_preemptions == 3

    run(body)


def test_stopping_ends_what_waits_too() -> None:
    async def body() -> None:
        them = await replicas()
        them.set.submit(request("a"))
        for one in them.each:
            one.die()
        await them.set.stop()
        assert them.client.ends["a", 0].error == "the server is shutting down"
        assert all(one.state is EngineState.STOPPED for one in them.each)

    run(body)


def test_choices_that_end_in_one_step_are_all_delivered() -> None:
    async def body() -> None:
        them = await replicas()
        them.set.submit(request("r", n=2))
        holder = them.holder("r")
        ends = tuple(TokenOutput(request_id="r", choice=choice, token_ids=(5,), finish="length") for choice in (0, 1))
        holder._deliver(StepOutput(step_id=1, outputs=ends, stats=EngineStats(blocks_total=1)))
        assert set(them.client.ends) == {("r", 0), ("r", 1)}
        assert not any(row.streams for row in them.set.rows())

    run(body)


def test_replicas_wanted_follow_the_work_and_an_idle_server_wants_none() -> None:
    async def body() -> None:
        them = await replicas()
        assert them.set.wanted().count == 0
        for i in range(40):
            them.set.submit(request(f"r{i}", tuple(range(500)), tokens=400))
        few = them.set.wanted()
        assert few.count >= 1
        for i in range(40, 400):
            them.set.submit(request(f"r{i}", tuple(range(500)), tokens=400))
        assert them.set.wanted().work > few.work

    run(body)


def test_statistics_of_a_node_out_of_reach_go_on_where_they_were() -> None:
    sums = StatsSum()
    sums.take("a", EngineStats(blocks_total=8, blocks_free=2, running=3, total_preemptions=5))
    sums.take("b", EngineStats(blocks_total=8, blocks_free=8, total_preemptions=1))
    away = sums.away("a")
    assert (away.running, away.blocks_total, away.blocks_free, away.total_preemptions) == (0, 16, 16, 6)
    again = sums.take("a", EngineStats(blocks_total=8, blocks_free=7, running=1, total_preemptions=6))
    assert (again.running, again.total_preemptions) == (1, 7)
    sums.away("a")
    sums.lost("a")  # another engine, which begins to count at 0
    assert sums.take("a", EngineStats(blocks_total=8, blocks_free=8, total_preemptions=2)).total_preemptions == 9
