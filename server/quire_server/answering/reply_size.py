"""How large a reply is about to be, where it may be large: what it is made of takes as much memory as its JSON.

Promises: never far too little. Must not know: dialects, what is done with the number.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.prepare import Job

_LOGPROB_BYTES = 72  # of one token's log-probability among others
_ID_BYTES = 8


def size_of_prompts(job: Job) -> int:
    """What is told of the prompts, known before anything runs."""
    reply = job.options.reply
    num_ids = sum(len(request.prompt_token_ids) for request in job.requests)
    size = sum(map(len, job.prompt_texts)) + (_ID_BYTES * num_ids if reply.token_ids else 0)
    if reply.num_prompt_logprobs is not None:
        size += num_ids * (reply.num_prompt_logprobs + 1) * _LOGPROB_BYTES
    return size


def size_of_choices(choices: Sequence[ChoiceDelta]) -> int:
    """What has been generated."""
    size = 0
    for choice in choices:
        size += len(choice.text) + len(choice.reasoning) + _ID_BYTES * len(choice.token_ids)
        if choice.logprobs:
            alternatives = len(choice.logprobs[0].top_ids) + len(choice.logprobs[0].asked_ids)
            size += len(choice.logprobs) * (alternatives + 1) * _LOGPROB_BYTES
    return size
