"""What the scheduler's machine draws, and a plain-Python model of what a request needs, may resume and must produce.

Promises: blocks, slots and tokens are counted one by one, not by the scheduler's formulas.
Must not know: batches, the machine.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

from hypothesis import strategies as st

from quire_engine.contract.limits import AdmissionName, SchedulerConfig, SchedulerLimits
from quire_engine.contract.types import BeamParams, GenerationRequest, Pooling, SamplingParams, StopParams, TokenOutput
from quire_engine.scheduling.block_pool import BlockPool
from quire_engine.scheduling.policies import ItlTarget, Policies, policies_for
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group
from support.fake_executor import expected_tokens
from support.limits import scheduler_config

# Groups of layers by their windows; most models have one group that keeps every position.
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None,), (None, 3), (5,), (None, 4, 4), (7, 2))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    min_chunk, max_num_seqs = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    windows = draw(st.sampled_from(WINDOWS))
    return scheduler_config(
        num_blocks=draw(st.integers(5, 24)) * len(windows),
        windows=windows,
        block_size=draw(st.integers(1, 5)),
        max_model_len=draw(st.integers(24, 48)),
        max_num_seqs=max_num_seqs,
        min_chunk=min_chunk,
        max_num_batched_tokens=max_num_seqs + min_chunk + draw(st.integers(0, 12)),
        prefill_chunk=min_chunk + draw(st.integers(0, 8)),
        itl_target=draw(st.sampled_from([0.0, 0.2, 0.8])),
        max_num_partial_prefills=draw(st.integers(1, 3)),
        max_bypasses=draw(st.integers(0, 4)),
        elder_age_steps=draw(st.integers(0, 8)),
        enable_prefix_caching=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority", "lpm", "dlpm"])),
        admission=draw(st.sampled_from(get_args(AdmissionName))),
    )


def policies(limits: SchedulerLimits) -> Policies:
    """The usual ones; a step takes a second, and with a target few prompt tokens fit beside decodes."""
    return dataclasses.replace(policies_for(limits), itl=ItlTarget(limits.itl_target, fewest=1))


def fits(config: SchedulerConfig, prompt: int, max_tokens: int, n: int) -> bool:
    """I9's model: blocks of the shared prompt and of every choice, counted one by one where no window is passed."""
    if prompt == 0 or prompt + max_tokens > config.max_model_len or n > config.limits.max_choices:
        return False
    if config.windows != (None,):
        return config.footprint(num_prompt=prompt, max_new_tokens=max_tokens, n=n) <= config.num_blocks
    computed = prompt + max(0, max_tokens - 1)
    blocks = {
        (
            p // config.limits.block_size,
            choice if (p // config.limits.block_size + 1) * config.limits.block_size > prompt else "shared",
        )
        for choice in range(n if max_tokens > 1 else 1)
        for p in range(computed)
    }
    return len(blocks) <= config.num_blocks


def feasible(config: SchedulerConfig, wanted: GenerationRequest) -> bool:
    return fits(config, len(wanted.prompt_token_ids), wanted.stop.max_new_tokens, wanted.num_sequences)


def requests() -> st.SearchStrategy[GenerationRequest]:
    """Prompts of three families that share their first tokens; of a quarter of them vectors are wanted, or beams."""
    pooled = st.tuples(_for_tokens(), st.sampled_from(["", "", "", "", "", "", "last", "mean"])).map(_perhaps_pooled)
    return st.tuples(pooled, st.none() | st.none() | _beams()).map(_perhaps_searched)


def _beams() -> st.SearchStrategy[BeamParams]:
    return st.builds(
        BeamParams,
        width=st.integers(1, 4),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
    )


def _perhaps_searched(drawn: tuple[GenerationRequest, BeamParams | None]) -> GenerationRequest:
    wanted, beam = drawn
    if beam is None or wanted.pooling or wanted.stop.max_new_tokens == 0:
        return wanted
    stops = tuple(stop for stop in wanted.stop.stop_token_ids if stop % 3 == 0)
    return dataclasses.replace(
        wanted,
        sampling=SamplingParams(num_prompt_logprobs=wanted.sampling.num_prompt_logprobs, min_tokens=wanted.priority),
        stop=StopParams(max_new_tokens=wanted.stop.max_new_tokens, stop_token_ids=stops),
        n=min(wanted.n, beam.width),
        resumed_token_ids=(),
        finished_choices=(),
        beam=beam,
    )


def _perhaps_pooled(drawn: tuple[GenerationRequest, Pooling]) -> GenerationRequest:
    wanted, pooling = drawn
    if not pooling:
        return wanted
    return GenerationRequest(
        request_id="",
        prompt_token_ids=wanted.prompt_token_ids,
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=0),
        priority=wanted.priority,
        cache_salt=wanted.cache_salt,
        weight=wanted.weight,
        pooling=pooling,
    )


@st.composite
def _for_tokens(draw: st.DrawFn) -> GenerationRequest:
    length, family = draw(st.integers(0, 24)), draw(st.integers(0, 2))
    return GenerationRequest(
        request_id="",
        prompt_token_ids=tuple(p if p < 9 + family else p + 50 * family for p in range(length)),
        # With a penalty the batch carries the output, for the executor to check the blocks against.
        sampling=SamplingParams(num_prompt_logprobs=draw(st.sampled_from([None, None, None, 1])), presence_penalty=1.0),
        stop=StopParams(
            max_new_tokens=draw(st.sampled_from([0, 1, 2, 5, 8, 12, 16, 20])),
            stop_token_ids=tuple(range(draw(st.sampled_from([0, 0, 60])))),
        ),
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from(["", "", "tenant", "a\0", "a\0", "b\0tenant"])),
        weight=draw(st.sampled_from([1.0, 1.0, 4.0])),
        cache_ttl=draw(st.sampled_from([0.0, 0.0, 3.0, 1e6])),
        # How many tokens each choice resumes with, and who has ended: made true once the request is feasible.
        resumed_token_ids=draw(st.sampled_from([(), (), ((0,) * 3, (), (0,) * 6, (0,)), ((), (0,), (), (0,) * 4)])),
        finished_choices=draw(st.sampled_from([(), (), (1,), (0,)])),
    )


def shrunk_to_fit(config: SchedulerConfig, wanted: GenerationRequest) -> GenerationRequest:
    """The nearest feasible request: fewer choices, then fewer tokens, then a shorter prompt."""
    prompt, tokens, n = wanted.prompt_token_ids or (1,), wanted.stop.max_new_tokens, wanted.num_sequences
    while not fits(config, len(prompt), tokens, n):
        if n > config.limits.max_choices:
            n -= 1
        elif tokens > 2:
            tokens -= 1
        elif len(prompt) > 4:
            prompt = prompt[:-1]
        else:
            n -= 1
    if wanted.beam is not None:
        wanted = dataclasses.replace(wanted, beam=dataclasses.replace(wanted.beam, width=n))
    return dataclasses.replace(
        wanted,
        prompt_token_ids=prompt,
        stop=dataclasses.replace(wanted.stop, max_new_tokens=tokens),
        n=min(wanted.n, n),
    )


def truly_resumed(wanted: GenerationRequest) -> GenerationRequest:
    """With resumed tokens that the request would have produced; without, where nothing is left to resume."""
    finished = tuple(choice for choice in wanted.finished_choices if choice < wanted.n)
    if not wanted.resumed_token_ids or len(finished) == wanted.n or wanted.stop.max_new_tokens == 0:
        return dataclasses.replace(wanted, resumed_token_ids=(), finished_choices=())
    full = [expected_tokens(wanted, choice) for choice in range(wanted.n)]
    resumed = tuple(t[: min(len(k), len(t) - 1)] for t, k in zip(full, wanted.resumed_token_ids, strict=False))
    return dataclasses.replace(wanted, resumed_token_ids=resumed, finished_choices=finished)


def order_of_reuse(pool: BlockPool) -> list[int]:
    """The blocks without a reference: free ones in the order of their use, then cached ones by owner."""
    return [*reversed(pool._free), *pool.shares.cached()]


def filled_slots(roster: Roster, block_size: int) -> dict[int, int]:
    """By block id: how many of its slots hold something, counted in the tables of all sequences."""
    filled: dict[int, int] = {}
    for sequence in roster.sequences.values():
        for table in sequence.kv.tables:
            for index, block in enumerate(table.held, table.num_passed):
                inside = min(block_size, max(0, sequence.kv.num_computed - index * block_size))
                filled[block] = max(inside, filled.get(block, 0))
    return filled


def work_left(elder: Group | None) -> int:
    """Tokens that the elder's sequences have still to compute; 0 where there is no elder."""
    if elder is None:
        return 0
    whole = elder.num_prompt_tokens + elder.max_new_tokens
    return sum(whole - sequence.kv.num_computed for sequence in elder.sequences)


def check_prompt_logprobs(wanted: GenerationRequest, choice: int, outputs: list[TokenOutput]) -> None:
    """Among all `outputs`, exactly the first one of choice 0 has them, if they were asked for."""
    own = [o for o in outputs if (o.request_id, o.choice) == (wanted.request_id, choice)]
    given = [index for index, output in enumerate(own) if output.prompt_logprobs is not None]
    resumed = wanted.resumed_token_ids and wanted.resumed_token_ids[0]
    if wanted.sampling.num_prompt_logprobs is None or choice != 0 or resumed:
        assert given == []
        return
    assert given == [0]
    first, *rest = own[0].prompt_logprobs
    assert first is None
    assert tuple(entry.token_id for entry in rest) == wanted.prompt_token_ids[1:]
