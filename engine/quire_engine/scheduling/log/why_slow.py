"""Explains a request's latency: its time in each phase, and one sentence on the largest cause.

The parts before the first token add up to the time to first token, and all parts to the request's whole time. Of the
prompt it says why no more was cached; of its tokens it names the one in which an earlier prompt differs, and no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Values
from dataclasses import asdict, dataclass

from quire_engine.scheduling.log.request_life import Nearest, Phase, RequestLife, Spent
from quire_engine.scheduling.log.step_log import Step, StepLog

MOST_TAKERS = 8  # in one explanation
MOST_NAMED = 3  # in one sentence
_UNEVEN = 0.2  # of its steps' time, between the ranks that waited most and least, so that `why` names it
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
_ON_THE_WAY = {
    "transfer": "waiting for KV blocks of its prompt from another engine",
    "files": "waiting for KV blocks of its prompt from --kv-offload-dir",
}
_PHASES: dict[Phase, str] = {
    "transit": "reaching the scheduler: the way to the engine process, the step that ran meanwhile, a grammar's"
    " compilation, or an engine process that ended before this one",
    "prefill": "computing its prompt",
    "decode": "computing its own output",
    "recompute": "computing tokens again after a preemption",
}
_HELD: dict[str, str] = {
    "client": "being held, because its client did not read its tokens",
    "adapters": "giving way to requests for other adapters, whose turn it was; a larger --max-loras would shorten it",
}


def summary(life: RequestLife, step: int, now: float) -> dict[str, object]:
    """A request's line in a list of requests."""
    return {
        "request_id": life.request_id,
        "state": life.phase,
        "reason": life.reason if life.phase in {"queue", "preempted", "held"} else "",
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


def explanation(life: RequestLife, step: int, log: StepLog) -> dict[str, object]:
    """The record of one request in full, up to `step`."""
    steps, now = log.steps, log.now
    account = life.spent_until(step, now)
    before, takers = life.before_first_token, _takers(life, log)
    beside, (waited, computed) = _beside_prompts(life, steps), _rank_seconds(life, steps)
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
        "took_blocks": [asdict(each) for each in takers],
        "num_guessed": life.num_guessed,
        "num_guessed_right": life.num_guessed_right,
        "num_stalls": life.num_stalls,
        "stalls": [asdict(each) for each in life.stalls],
        "decode_beside_prompts": beside,
        "rank_seconds": waited,
        "prefix": _prefix(life, log),
        "why": _why(life, account, beside, takers) + _slow_rank(waited, computed),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Taker:
    """A request that had the blocks which the explained one lacked."""

    request_id: str
    preemptions: int  # of the explained request, for this one
    tokens: int  # its largest context when the explained request began to wait for blocks; 0: it ran at no such time


def _takers(life: RequestLife, log: StepLog) -> list[Taker]:
    """The requests that took the blocks, the ones it was preempted for first, then by the size of their contexts."""
    preempted = Counter(each.by for each in life.preemptions if each.by)
    held: dict[str, int] = {}
    for step_id in life.kv_wait_steps:
        for request_id, tokens in log.contexts(step_id).items():
            held[request_id] = max(tokens, held.get(request_id, 0))
    found = [
        Taker(request_id=name, preemptions=preempted[name], tokens=held.get(name, 0))
        for name in {*preempted, *held} - {life.request_id}
    ]
    found.sort(key=lambda one: (-one.preemptions, -one.tokens, one.request_id))
    return found[:MOST_TAKERS]


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
    with_prompts = [step for step in steps if life.first_token_step < step.step_id <= last and step.num_prefills]
    return {
        "steps": len(with_prompts),
        "prompt_tokens": sum(step.num_prefills for step in with_prompts),
        "seconds": sum(step.seconds for step in with_prompts),
    }


def _rank_seconds(life: RequestLife, steps: Values[Step]) -> tuple[list[float], float]:
    """The seconds that each rank waited for the others in its logged steps, and those that these steps took."""
    first, last = life.first_step, life.last_step
    if first is None or not any(step.rank_seconds for step in steps):
        return [], 0.0
    own = [step for step in steps if first <= step.step_id and (last is None or step.step_id <= last)]
    waited = zip(*(step.rank_seconds for step in own if step.rank_seconds), strict=True)
    return list(map(sum, waited)), sum(step.seconds for step in own)


def _slow_rank(waited: list[float], computed: float) -> str:
    """A sentence on a rank that the others waited for; empty: the ranks were even."""
    if not waited or max(waited) - min(waited) < _UNEVEN * computed:
        return ""
    slowest = waited.index(min(waited))
    return (
        f" In {max(waited):.3f} s of the {computed:.3f} s that its steps took a rank waited for others; rank {slowest}"
        " waited least, so it is the slow one: something else runs on its cores, or it has fewer."
    )


def _why(life: RequestLife, account: Account, beside: dict[str, float | int], takers: Values[Taker]) -> str:
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
        if life.num_guessed_right:
            text += f", {life.num_guessed_right} of them guessed ahead"
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
        by = [f"{one.request_id} ({one.preemptions})" for one in takers[:MOST_NAMED] if one.preemptions]
        text += f", for {', '.join(by)}" if by else ""
    held = [f"{one.request_id} ({one.tokens:,} tokens)" for one in takers[:MOST_NAMED] if one.tokens]
    if held and not any(one.preemptions for one in takers):
        text += f"; the blocks it lacked were held by {', '.join(held)}"
    return text + "."


def _cause(phase: Phase, reason: str) -> str:
    if phase == "queue":
        return _WAITS.get(reason, f"waiting ({reason})")
    if phase == "preempted":
        return f"waiting to run again ({reason or 'blocks'})"
    if phase == "held":
        return _HELD[reason]
    if phase == "transit" and reason:
        return _ON_THE_WAY[reason]
    return _PHASES[phase]


def _prefix(life: RequestLife, log: StepLog) -> dict[str, object] | None:
    """The cached part of the prompt, and the reason why it is no longer; None where nothing is kept to be compared.

    `common_tokens`: how long its beginning is that of an earlier content of its cache scope, of `request_id`; there it
    has `token`, and the other one `other_token`, null where they end.
    """
    nearest = life.nearest
    if nearest is None:
        return None
    other = log.request_of(nearest.ordinal) if nearest.num_tokens else None
    return {
        "cached_tokens": life.num_cached_tokens,
        "common_tokens": nearest.num_tokens,
        "request_id": other,
        "token": nearest.token,
        "other_token": nearest.other_token,
        "why": _why_no_more(life, log, other or "an earlier request"),
    }


def _why_no_more(life: RequestLife, log: StepLog, other: str) -> str:
    nearest, cached = life.nearest, life.num_cached_tokens
    if nearest is None or life.first_step is None:
        return "It has not begun to run."
    common = nearest.num_tokens
    if not life.reads_cache:
        return "Its prompt is computed whole: its log-probabilities, or the mean of its rows, were asked for."
    if not common:
        return "Nothing that is remembered in its cache scope begins with its first token."
    if common - cached >= log.block_size and cached < life.num_prompt_tokens - 1:
        return (
            f"Its first {common} tokens are those of {other}; behind {cached} of them the blocks were not computed yet,"
            " or had been given to others: more KV memory keeps them for longer."
        )
    return _where_they_part(nearest, other)


def _where_they_part(nearest: Nearest, other: str) -> str:
    if nearest.token is None:
        return f"All of it is the beginning of {other}."
    if nearest.other_token is None:
        return f"It goes on behind the {nearest.num_tokens} tokens of {other}."
    return (
        f"It is like {other} up to position {nearest.num_tokens}, where it has token {nearest.token} and the other one"
        f" {nearest.other_token}."
    )
