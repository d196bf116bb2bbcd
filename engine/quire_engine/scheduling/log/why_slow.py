"""Explains a request's latency: its time in each phase, and one sentence on the largest cause.

The parts before the first token add up to the time to first token, and all parts to the request's whole time.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import asdict

from quire_engine.scheduling.log.request_life import Phase, RequestLife, Spent
from quire_engine.scheduling.log.step_log import Step

Account = dict[tuple[Phase, str], Spent]

_WAITS = {
    "kv": "waiting for KV blocks, which running requests held; a larger --kv-memory, or fewer and shorter requests at"
    " once, would shorten it",
    "slots": "waiting for one of the --max-num-seqs slots for running sequences",
    "budget": "waiting for a share of the steps' tokens, all of which went to other requests; --max-num-batched-tokens"
    " and --itl-target limit them",
    "prefix": "waiting for a prefix of its prompt that another request was computing",
    "": "waiting for the end of the step that ran when it arrived",
}
_PHASES: dict[Phase, str] = {
    "transit": "reaching the scheduler: the way to the engine process, the step that ran meanwhile, a grammar's"
    " compilation, or an engine process that ended before this one",
    "prefill": "computing its prompt",
    "decode": "computing its own output",
    "recompute": "computing tokens again after a preemption",
    "held": "being held, because its client did not read its tokens",
}


def summary(life: RequestLife, step: int, now: float) -> dict[str, object]:
    """A request's line in a list of requests."""
    return {
        "request_id": life.request_id,
        "state": life.phase,
        "reason": life.reason if life.phase in {"queue", "preempted"} else "",
        "age_seconds": sum(each.seconds for each in life.spent_until(step, now).values()),
        "age_steps": (life.last_step or step) - life.added_step,
        "wait_bound_steps": life.wait_bound,
        "is_elder": life.elder_step is not None and not life.has_ended,
        "prompt_tokens": life.num_prompt_tokens,
        "cached_tokens": life.num_cached_tokens,
        "output_tokens": _output(life),
        "choices": life.num_choices,
        "num_preemptions": life.num_preemptions,
        "finish": {str(choice): why for choice, why in life.finishes.items()},
    }


def explanation(life: RequestLife, step: int, now: float, steps: Values[Step]) -> dict[str, object]:
    """The record of one request in full; `steps`: the logged steps, the earliest first."""
    account = life.spent_until(step, now)
    before = life.before_first_token
    beside = _beside_prompts(life, steps)
    chunks = [asdict(chunk) | {"seconds": _seconds(chunk.step, steps)} for chunk in life.chunks]
    return summary(life, step, now) | {
        "max_new_tokens": life.max_new_tokens,
        "resumed_tokens": life.num_resumed_tokens,
        "added_step": life.added_step,
        "elder_step": life.elder_step,
        "first_step": life.first_step,
        "first_token_step": life.first_token_step,
        "last_step": life.last_step,
        "ttft_seconds": None if before is None else sum(each.seconds for each in before.values()),
        "before_first_token": None if before is None else _parts(before),
        "spent": _parts(account),
        "kv_wait_seconds": life.group.kv_wait_seconds if life.group is not None else life.kv_wait_seconds,
        "num_chunks": life.num_chunks,
        "chunks": chunks,
        "preemptions": [asdict(each) for each in life.preemptions],
        "num_stalls": life.num_stalls,
        "stalls": [asdict(each) for each in life.stalls],
        "decode_beside_prompts": beside,
        "why": _why(life, account, beside),
    }


def _output(life: RequestLife) -> int:
    return life.num_output_tokens + sum(each.num_output_tokens for each in life.sequences.values())


def _parts(account: Account) -> list[dict[str, object]]:
    """The account as a list, in the order in which the phases began."""
    return [
        {"phase": phase, "reason": reason, "seconds": spent.seconds, "steps": spent.steps}
        for (phase, reason), spent in account.items()
        if spent.seconds or spent.steps
    ]


def _seconds(step_id: int, steps: Values[Step]) -> float | None:
    """The duration of a step, if it is in the log."""
    index = step_id - steps[0].step_id if steps else -1
    return steps[index].seconds if 0 <= index < len(steps) else None


def _beside_prompts(life: RequestLife, steps: Values[Step]) -> dict[str, float | int]:
    """The logged steps of its decode that also computed other requests' prompts."""
    if life.first_token_step is None:
        return {"steps": 0, "prompt_tokens": 0, "seconds": 0.0}
    last = life.last_step if life.last_step is not None else steps[-1].step_id
    with_prompts = [
        step for step in steps if life.first_token_step < step.step_id <= last and step.num_tokens > step.num_decodes
    ]
    return {
        "steps": len(with_prompts),
        "prompt_tokens": sum(step.num_tokens - step.num_decodes for step in with_prompts),
        "seconds": sum(step.seconds for step in with_prompts),
    }


def _why(life: RequestLife, account: Account, beside: dict[str, float | int]) -> str:
    """One sentence on the largest part, with its share."""
    causes: dict[str, float] = {}
    for (phase, reason), spent in account.items():
        causes[_cause(phase, reason)] = causes.get(_cause(phase, reason), 0.0) + spent.seconds
    whole = sum(causes.values())
    if whole <= 0.0:
        return "It has only just arrived."
    cause, seconds = max(causes.items(), key=lambda each: each[1])
    took = "has taken" if not life.has_ended else "took"
    text = f"It {took} {whole:.3f} s; {seconds:.3f} s of them ({seconds / whole:.0%}) went to {cause}"
    if cause == _PHASES["decode"]:
        text += f", {_output(life)} tokens"
        if beside["seconds"] > 0.3 * seconds:
            text += (
                f"; in {beside['seconds']:.3f} s of it the steps computed {beside['prompt_tokens']} tokens of others'"
                " prompts too, which --itl-target limits"
            )
    if cause == _PHASES["prefill"]:
        tokens = life.num_prompt_tokens - life.num_cached_tokens
        text += f", {tokens} tokens in {life.num_chunks} slices"
    if life.num_preemptions:
        text += f"; it was preempted {life.num_preemptions} times"
    return text + "."


def _cause(phase: Phase, reason: str) -> str:
    if phase == "queue":
        return _WAITS.get(reason, f"waiting ({reason})")
    if phase == "preempted":
        return f"waiting after a preemption ({reason or 'blocks'})"
    return _PHASES[phase]
