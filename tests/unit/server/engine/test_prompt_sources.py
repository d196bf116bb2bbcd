"""Which replica a request's KV blocks are fetched from, and what becomes of a prompt that is computed for another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire_engine.contract.block_hashes import routed_names
from quire_engine.contract.config import Role
from quire_engine.contract.plan import TransferPart
from quire_engine.contract.types import EngineStats, GenerationRequest, KVSource, PrefixChanges, StepOutput
from support.plans import changed
from support.scripted_replicas import Replicas, ScriptedSupervisor, replicas
from support.supervising import request, run

LONG = tuple(range(200))
CHUNK = 16


async def lending(*roles: Role, lends: bool = True, policy: str = "predicted_ttft") -> Replicas:
    """A set whose replicas lend blocks, at addresses that end with their numbers."""
    them = await replicas(len(roles), policy=policy)
    for number, (each, role) in enumerate(zip(them.each, roles, strict=True)):
        assert each.plan is not None
        limits = replace(each.plan.scheduler.limits, prefill_chunk=CHUNK)
        scheduler = replace(each.plan.scheduler, limits=limits)
        address = f"10.0.0.7:910{number}" if lends else ""
        each.plan = replace(each.plan, transfer=TransferPart(role=role, address=address), scheduler=scheduler)
    return them


def of(them: Replicas, number: int, name: str) -> GenerationRequest:
    return them.each[number].requests[name]


def caches(engine: ScriptedSupervisor, prompt: tuple[int, ...]) -> None:
    """The replica tells that it has the prompt."""
    names = routed_names(prompt, "", 16)
    told = PrefixChanges(number=1, registered=names, depths=tuple(range(len(names))))
    engine._deliver(StepOutput(step_id=1, outputs=(), stats=EngineStats(), prefixes=told))


def test_a_long_prompt_is_computed_where_prompts_are_and_answered_elsewhere() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")
        kinds: list[str] = []
        them.set.sources.on_source = kinds.append
        them.set.submit(request("a", LONG))
        asked, prompt = of(them, 1, "a"), of(them, 0, "prefill-a")
        assert asked.kv_source is not None
        assert (asked.kv_source.address, asked.kv_source.is_computing) == ("10.0.0.7:9100", True)
        assert asked.kv_source.own_seconds > 0
        assert (prompt.stop.max_new_tokens, prompt.prompt_token_ids, prompt.kv_source) == (0, LONG, None)
        ahead = [row.prompt_tokens_ahead for row in them.set.rows()]
        assert ahead == [len(LONG), 16]
        assert kinds == ["prefill"]
        them.each[0].say("prefill-a", finish="length")
        assert [row.prompt_tokens_ahead for row in them.set.rows()] == [0, 16]
        them.each[1].say("a", 5, finish="length")
        assert them.client.tokens["a", 0] == [5]
        assert [row.prompt_tokens_ahead for row in them.set.rows()] == [0, 0]

    run(body)


def test_what_is_not_needed_any_more_is_ended() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")
        for name, end in (
            ("a", lambda: them.each[1].say("a", 5)),  # it was computed there meanwhile
            ("b", lambda: them.set.abort("b")),
            ("c", lambda: them.each[1].say("c", finish="error", error="as the test says")),
        ):
            them.set.submit(request(name, (*LONG, ord(name))))
            assert f"prefill-{name}" in them.each[0].requests
            end()
            assert f"prefill-{name}" not in them.each[0].requests
            assert them.set.rows()[0].prompt_tokens_ahead == 0

    run(body)


def test_short_prompts_and_those_that_need_all_rows_stay_where_they_are() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")
        them.set.submit(request("a", LONG[: 10 * CHUNK - 1]))
        whole = request("b", LONG)
        them.set.submit(replace(whole, sampling=replace(whole.sampling, num_prompt_logprobs=0)))
        assert them.each[0].requests == {}
        assert {each.kv_source for each in them.each[1].requests.values()} == {None}
        them = await lending("prefill", "decode", lends=False)
        them.set.submit(request("a", LONG))
        assert (them.each[0].requests, of(them, 1, "a").kv_source) == ({}, None)

    run(body)


def test_a_busy_replica_gets_no_prompts_for_others() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")
        for number in range(40):
            them.set.submit(request(f"r{number}", (*LONG, number)))
        given = len(them.each[0].requests)
        assert 0 < given < 40
        assert sum(each.kv_source is not None for each in them.each[1].requests.values()) == given

    run(body)


def test_a_lost_replica_computes_for_nobody_and_one_for_prompts_answers_when_no_other_can() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")
        them.set.submit(request("a", LONG))
        them.each[0].die()
        assert "a" in them.each[1].requests
        assert them.set.rows()[0].prompt_tokens_ahead == 0
        them.each[1].die()
        them.set.submit(request("b", LONG))
        them.each[0].come_back()
        assert {name.partition("~")[0] for name in them.each[0].requests} >= {"a", "b"}

    run(body)


def test_a_prefix_that_another_replica_has_is_fetched_from_there() -> None:
    async def body() -> None:
        them = await lending("both", "both", policy="round_robin")
        caches(them.each[0], LONG)
        sources: list[KVSource | None] = []
        for name in ("a", "b"):
            them.set.submit(request(name, (*LONG, ord(name))))
            sources.append(them.holder(name).requests[name].kv_source)
        (fetched,) = (each for each in sources if each is not None)
        assert (fetched.address, fetched.is_computing) == ("10.0.0.7:9100", False)

    async def moved() -> None:
        them = await lending("both", "both", "both", policy="round_robin")
        them.set.submit(request("a", LONG))
        first = them.holder("a")
        first.say("a", 7)
        other = next(each for each in them.each if each is not first)
        caches(other, LONG)
        first.die()
        moved_to = them.holder("a")
        (got,) = (each for name, each in moved_to.requests.items() if name.startswith("a"))
        if moved_to is not other:
            assert got.kv_source is not None
            assert not got.kv_source.is_computing
        assert not any(name.startswith("prefill-") for each in them.each for name in them.ids(each))

    run(body)
    run(moved)


def test_replicas_of_other_numerics_lend_nothing() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")
        plan: Any = them.each[0].plan
        them.each[0].plan = changed(plan, identity={"numerics": "other"})
        them.set.submit(request("a", LONG))
        assert (them.each[0].requests, of(them, 1, "a").kv_source) == ({}, None)

    run(body)


def test_a_replica_from_which_blocks_came_late_computes_nothing_until_it_is_asked_again() -> None:
    async def body() -> None:
        them = await lending("prefill", "decode")

        def tells(*late: str) -> None:
            stats = EngineStats(blocks_total=512, late_peers=frozenset(late))
            them.each[1]._deliver(StepOutput(step_id=1, outputs=(), stats=stats))

        them.set.submit(request("a", LONG))
        assert "prefill-a" in them.each[0].requests
        tells("10.0.0.7:9100")
        assert them.each[0].requests == {}
        assert them.set.rows()[0].prompt_tokens_ahead == 0
        them.set.submit(request("b", (1, *LONG)))
        assert (them.each[0].requests, of(them, 1, "b").kv_source) == ({}, None)
        tells()
        them.set.submit(request("c", (2, *LONG)))
        assert list(them.each[0].requests) == ["prefill-c"]
        assert of(them, 1, "c").kv_source is not None

    run(body)
