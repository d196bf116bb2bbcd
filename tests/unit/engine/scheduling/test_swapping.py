"""Victims that are swapped out, prefixes that are kept on the host: who computes what again, and what it costs."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.swapping import SwapCost, SwappingAllocator
from support.fake_executor import CorruptKV, Run, expected_embedding, new_run, outputs_of, produced_alone, request
from support.scheduler_model import check_prompt_logprobs


def swapping_run(**limits: object) -> Run:
    """Ten blocks of four tokens; whoever is preempted is swapped, as a copy costs nothing."""
    defaults = {"num_blocks": 10, "block_size": 4, "num_host_blocks": 20, "max_num_seqs": 4, "min_chunk": 4}
    return new_run(**{**defaults, **limits})


def computed(run: Run, name: str) -> list[int]:
    """The positions that were computed for a request, in order."""
    return [
        position
        for batch in run.log
        for item in batch.items
        if item.prompt_token_ids == run.wanted[name].prompt_token_ids
        for position in range(item.start, item.end)
    ]


def play(run: Run, *wanted: object) -> None:
    run.wanted = {one.request_id: one for one in wanted}
    run.add(*wanted)
    run.to_end()
    assert produced_alone(run, *wanted)


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_request_computes_nothing_again(caching: bool) -> None:
    run = swapping_run(enable_prefix_caching=caching)
    play(run, request("a", 14, 14), request("b", 14, 14))
    stats = run.scheduler.stats()
    assert stats.total_preemptions_by_mode == {"recompute": 0, "swap": stats.total_preemptions}
    assert stats.total_preemptions > 0
    assert stats.total_swapped_in_blocks > 0
    for name in "ab":
        assert computed(run, name) == list(range(14 + 14 - 1))


def test_without_host_blocks_it_is_computed_again() -> None:
    run = swapping_run(num_host_blocks=0, enable_prefix_caching=False)
    play(run, request("a", 14, 14), request("b", 14, 14))
    stats = run.scheduler.stats()
    assert stats.total_preemptions_by_mode == {"recompute": stats.total_preemptions, "swap": 0}
    assert len(computed(run, "b")) > 27


def test_a_victim_that_the_host_has_no_room_for_is_computed_again() -> None:
    run = swapping_run(num_host_blocks=2)
    play(run, request("a", 14, 14), request("b", 14, 14))
    assert run.scheduler.stats().total_preemptions_by_mode["swap"] == 0
    assert run.scheduler.stats().total_preemptions > 0


def test_a_victim_that_is_cheaper_to_compute_is_computed_again() -> None:
    """Steps take a second: once the first prompts have told what a token costs, no swap is worth so slow a copy."""
    run = swapping_run(num_blocks=30, swap_seconds=100.0, num_host_blocks=60)
    play(run, request("a", 50, 14), request("b", 50, 14))
    assert run.scheduler.stats().total_preemptions_by_mode["swap"] == 0
    assert run.scheduler.stats().total_preemptions > 0


def test_costs_are_compared_by_what_was_measured() -> None:
    cost = SwapCost(seconds_per_block=0.5)
    assert cost.prefers_swap(num_blocks=10, num_tokens=1)  # nothing is known of tokens yet
    cost.learn(prompt_tokens=8, num_decodes=0, seconds=800.0)  # too few to tell
    cost.learn(prompt_tokens=90, num_decodes=10, seconds=100.0)  # a second each
    assert cost.prefers_swap(num_blocks=10, num_tokens=10)
    assert not cost.prefers_swap(num_blocks=10, num_tokens=9)
    assert cost.prefers_restoring(num_blocks=10, num_tokens=5)
    assert not cost.prefers_restoring(num_blocks=10, num_tokens=4)


def test_what_the_pool_still_holds_is_not_copied() -> None:
    """The victim's prompt is another's too, and stays: only what is its own goes out and comes in."""
    run = swapping_run(num_blocks=9)
    shared = tuple(range(100, 116))
    first, second = request("a", shared, 16), request("b", (*shared, 7), 12)
    run.add(first)
    run.one_step()
    play(run, second)
    assert produced_alone(run, first)
    stats = run.scheduler.stats()
    assert stats.total_preemptions_by_mode["swap"] >= 1
    moved = [source for batch in run.log for source, _ in batch.swap_out]
    prompt = run.log[0].items[0].block_ids[:4]
    assert moved
    assert not set(moved) & set(prompt)


def test_an_evicted_prefix_is_matched_on_the_host() -> None:
    run = swapping_run()
    first, other = request("a", 17, 2), request("other", 36, 2)
    play(run, first)
    play(run, other)
    again = dataclasses.replace(first, request_id="again")
    play(run, again)
    assert outputs_of(run, "again")[-1].num_cached_tokens == 16
    assert run.scheduler.stats().total_swapped_in_blocks >= 1
    assert run.scheduler.stats().total_prefix_hit_tokens == 16


def test_the_host_keeps_what_was_wanted_last() -> None:
    """Five host blocks: the prefix that came first has gone, the one behind it is there."""
    run = swapping_run(num_blocks=6, num_host_blocks=5)
    for name in ("a", "b", "c"):
        play(run, request(name, 17, 2))
    for name, cached in (("b", 16), ("a", 0)):
        play(run, dataclasses.replace(request(name, 17, 2), request_id=f"{name} again"))
        assert outputs_of(run, f"{name} again")[-1].num_cached_tokens == cached


def test_prefixes_on_the_host_and_in_files_are_cold_for_other_scopes() -> None:
    """A guesser sends the very prompt, with the very salt, that a tenant has on the host; then after a restart."""

    def of(scope: str, name: str, number: str = "") -> object:
        length = 36 if name == "other" else 17
        own = request(name, length, 2, salt=f"{scope}\0salt")
        return dataclasses.replace(own, request_id=f"{scope} {name} {number}")

    def cached(run: Run, scope: str, number: str) -> tuple[int, int]:
        before = run.scheduler.stats().total_swapped_in_blocks
        play(run, of(scope, "a", number))
        swapped_in = run.scheduler.stats().total_swapped_in_blocks - before
        return outputs_of(run, f"{scope} a {number}")[-1].num_cached_tokens, swapped_in

    run = swapping_run()
    play(run, of("tenant", "a"))
    play(run, of("tenant", "other"))
    assert cached(run, "guesser", "1") == (0, 0)
    assert cached(run, "tenant", "again")[0] == 16
    play(run, of("tenant", "other", "again"))

    on_disk = run.scheduler._kv.host.pool._block_of
    keys = sorted(on_disk, key=lambda key: on_disk[key])
    assert [on_disk[key] for key in keys] == list(range(len(keys)))
    next_run = swapping_run()
    next_run.scheduler = Scheduler(run.scheduler._config, host_keys=keys)
    next_run.executor._host = run.executor._host
    assert cached(next_run, "another", "2") == (0, 0)
    host = next_run.scheduler._kv.host.pool
    assert {owner.scope for owner in host._owner_of.values()} == {""}, "of no tenant until one uses them"
    assert cached(next_run, "tenant", "2") == (16, 4)
    assert {owner.scope for owner in host._owner_of.values()} >= {"", "tenant"}


def test_choices_are_swapped_together_and_share_their_prompt_again() -> None:
    run = swapping_run(num_blocks=12)
    play(run, request("a", 13, 20), request("b", 14, 8, n=3))
    assert run.scheduler.stats().total_preemptions_by_mode["swap"] >= 1
    back = next(batch for batch in run.log if batch.swap_in)
    tables = [item.block_ids for item in back.items if item.num_prompt_tokens == 14]
    assert len(tables) == 3
    assert len({table[:3] for table in tables}) == 1  # the full blocks of the prompt
    assert len({table[3] for table in tables}) == 3  # of the one behind them each has its own


def test_a_copy_that_is_not_made_is_not_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice got a copy of the shared block, its sibling found no block, and all of them were preempted: the copy's
    target was never written, what is kept is in its source."""

    def played() -> Run:
        run = swapping_run(num_blocks=8, enable_prefix_caching=False)
        play(run, request("a", 16, 6), request("b", 6, 7, n=3))
        return run

    run = played()
    assert run.scheduler.stats().total_preemptions_by_mode["swap"] >= 1
    swap_out = SwappingAllocator.swap_out
    monkeypatch.setattr(SwappingAllocator, "swap_out", lambda self, sequences, _: swap_out(self, sequences, {}))
    with pytest.raises(CorruptKV):
        played()


def test_scores_and_sums_of_a_prompt_go_on_where_they_were() -> None:
    """Both are gathered slice by slice, and a swap keeps them; a result would be wrong if a row came twice."""
    run = swapping_run(num_blocks=10, prefill_chunk=4, max_num_batched_tokens=10, max_num_partial_prefills=3)
    scored = request("scored", 20, 4, prompt_logprobs=1)
    vector = dataclasses.replace(request("vector", 22, 0), pooling="mean")
    play(run, request("a", 5, 30), request("b", 5, 30), scored, vector)
    assert run.scheduler.stats().total_preemptions_by_mode["swap"] >= 1
    check_prompt_logprobs(scored, 0, run.outputs)
    assert run.finishes["vector", 0].embedding == expected_embedding(vector)


def test_an_abort_gives_the_host_blocks_back() -> None:
    run = swapping_run(enable_prefix_caching=False)
    run.add(request("a", 14, 14), request("b", 14, 14))
    while not run.scheduler.stats().total_preemptions:
        run.one_step()
    assert run.scheduler.stats().host_blocks_used > 0
    assert run.scheduler.abort("b")
    run.scheduler.check_invariants()
    assert run.scheduler.stats().host_blocks_used == 0
    run.to_end()
    assert run.scheduler.stats().blocks_used == 0


def test_a_swapped_elder_comes_in_first() -> None:
    """The oldest is preempted by priority while it is not the elder's turn, and then seated with what it kept."""
    run = swapping_run(scheduling_policy="priority", elder_age_steps=0)
    requests = [request(f"r{i}", 12, 12, priority=-i) for i in range(4)]
    for one in requests:
        run.add(one)
        run.one_step()
    run.to_end()
    assert produced_alone(run, *requests)
    assert run.scheduler.stats().total_preemptions_by_mode["swap"] >= 1


def test_the_step_log_counts_what_is_swapped() -> None:
    run = swapping_run()
    play(run, request("a", 14, 14), request("b", 14, 14))
    answer = run.scheduler.answer("steps", {"limit": 256})
    told = [step.swaps for step in answer["steps"]]
    assert told == [(len(batch.swap_out), len(batch.swap_in)) for batch in run.log]
    assert any(back for _, back in told)


def test_the_plan_says_what_is_kept() -> None:
    run = swapping_run()
    run.add(request("a", 14, 14), request("b", 14, 14))
    kept: list[int] = []
    planner = run.scheduler._planner
    plan = planner.plan

    def watched(*arguments: object) -> object:
        made = plan(*arguments)
        kept.extend(decision.num_tokens for decision in made.decisions if decision.kind == "preempted")
        return made

    planner.plan = watched
    run.to_end()
    assert kept
    assert min(kept) > 14
