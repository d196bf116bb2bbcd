"""A step of the log in words: what was computed, and for every decision the rule that fired.

Promises: each decision is one line that ends with its rule in brackets; an unknown one is told as it is.
Must not know: where steps come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SHOWN = 8  # characters of a request's id
_WAITS = {
    "kv": ("its prompt needs more free blocks than there are", "capacity: the whole prompt, or nothing"),
    "slots": ("as many sequences run as may", "--max-num-seqs"),
    "budget": ("the step's tokens are given, or enough others are in the middle of their prompts", "step budget"),
    "prefix": ("another request computes the beginning that both have", "shared prefix"),
}
_PREEMPTIONS = {
    "blocks": ("a running request grows and finds no free block", "victim policy"),
    "elder": ("the elder needs blocks or a slot", "elder rule"),
    "class": ("a higher class needs what it had", "service classes"),
    "device": ("the device had no memory to compute it", "starved"),
}


def narrate(step: dict[str, Any], *, since: float) -> Iterator[str]:
    """The lines of one step; `since` is the engine's time that counts as zero."""
    slices = step["slices"]
    took = f"{step['seconds'] * 1000:.1f} ms" if step["applied_at"] is not None else "not computed yet"
    yield (
        f"step {step['step_id']}  +{step['planned_at'] - since:.3f} s  {took if slices else 'nothing to compute'}"
        f"  {step['prefill_tokens']} prompt + {step['decode_tokens']} decode tokens"
        f"  running {step['running']}  waiting {step['waiting']}  blocks {step['blocks_used']}"
    )
    for decision in step["decisions"]:
        yield f"  {_decision(decision)}"
    for source, target in step["copies"]:
        yield f"  copy       block {source} to {target}: two sequences go on in it differently  [copy on write]"
    for request_id, choice, start, size in slices:
        if size > 1:
            yield f"  computes   {_name(request_id, choice)} tokens {start} to {start + size - 1}  [chunk]"
    num_single = sum(1 for each in slices if each[3] == 1)
    if num_single:
        yield f"  decodes    {num_single} {'sequence' if num_single == 1 else 'sequences'}, a token each  [no stall]"
    for request_id in step["starved"]:
        yield f"  preempted  {_name(request_id)}: {_PREEMPTIONS['device'][0]}  [starved]"
    for request_id, choice, why, said in step["ends"]:
        yield f"  ends       {_name(request_id, choice)} after {said} tokens  [{why}]"


def _decision(decision: dict[str, Any]) -> str:
    name, reason = _name(decision["request_id"]), decision["reason"]
    match decision["kind"]:
        case "elder":
            return f"elder      {name} is served first until it ends: overdue, or the longest here  [elder rule]"
        case "enters":
            cached = decision["num_tokens"]
            found = f", {cached} of its tokens are cached" if cached else ""
            return f"enters     {name}: a slot, blocks and tokens are there{found}  [admission]"
        case "waits":
            why, rule = _WAITS.get(reason, (reason, "queue"))
            return f"waits      {name}: {why}  [{rule}]"
        case "preempted":
            why, rule = _PREEMPTIONS.get(reason, (reason, "preemption"))
            return f"preempted  {name}: {why}  [{rule}]"
    return f"{decision['kind']:<10} {name}: {reason}  [{decision['kind']}]"


def _name(request_id: str, choice: int = 0) -> str:
    return request_id[:_SHOWN] + (f"/{choice}" if choice else "")
