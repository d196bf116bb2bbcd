"""Bodies with much in them, each allowed: lists of prompts, large texts at once, the strings of many tokens.

Promises: what is sent is made before the watch begins. Must not know: how the server cuts its work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from e2e.served import Served
from hostile.row import Row
from hostile.rows.text_work import post
from hostile.watch import Watch

TURN = 0.02  # seconds that the event loop may be held
TIMES = 3  # at most; the best counts
AT_ONCE = 8
_TEXT = "one tale of seven words, and more. "
Body = tuple[str, bytes]  # path, JSON


def _body(path: str, **fields: object) -> Body:
    return path, json.dumps(fields).encode()


def lists() -> list[Body]:
    """Eight of each at once: 64 prompts as texts, as ids with log-probabilities, and with stop strings; and inputs.

    Prompts begin alike: what the engine computes is not the matter.
    """
    texts = [f"{_TEXT * 100} {number}" for number in range(64)]
    ids = [[*range(5, 305), *range(5, 305), *range(5, 305), number + 5] for number in range(64)]
    return [
        *[_body("/v1/completions", prompt=texts, max_tokens=4)] * AT_ONCE,
        *[_body("/v1/completions", prompt=ids, max_tokens=4, logprobs=20, return_token_ids=True)] * AT_ONCE,
        *[_body("/v1/completions", prompt=["a"] * 64, max_tokens=4, stop=["x" * 200] * 4)] * AT_ONCE,
        _body("/v1/embeddings", input=[f"{number} {_TEXT * 4}" for number in range(1024)]),
    ]


def texts() -> list[Body]:
    """Of half a MiB, each in the turn of its process, and of 60 KiB, which are many."""
    large = [_body("/tokenize", prompt=f"{number} {_TEXT * 15_000}") for number in range(AT_ONCE)]
    return [*large, *(_body("/tokenize", prompt=f"{number} {_TEXT * 1_700}") for number in range(4 * AT_ONCE))]


def strings() -> list[Body]:
    """The strings of half a million tokens, and of a few thousand for many clients."""
    many = _body("/tokenize", prompt=_TEXT * 60_000, return_token_strs=True)
    return [many, *[_body("/tokenize", prompt=_TEXT * 700, return_token_strs=True)] * AT_ONCE]


def _row(name: str, what: str, bodies: Sequence[Body]) -> Row:
    async def act(server: Served) -> str:
        async with Watch(server.url, pid=server.process.pid, streams=0) as watch:
            held = []
            for _ in range(TIMES):
                answers = await asyncio.gather(*(post(server.url, path, body) for path, body in bodies))
                assert {status for status, _, _ in answers} == {200}, [status for status, _, _ in answers]
                seen = await watch.seen()
                held.append(max(seen.stall - seen.late, 0.0))  # the machine's own noise is not the server's
                if held[-1] <= TURN:
                    break
            faults = await watch.canary()
        told = f"{len(bodies)} at once, the slowest answered after {max(took for *_, took in answers):.1f} s; {seen}"
        assert not faults, f"{faults}; {told}"
        assert min(held) <= TURN, told
        return told

    flags = ("--max-num-queued-reqs", "2048", "--max-body-bytes", "64MiB")
    return Row(name=f"many-{name}", what=what, act=act, flags=flags)


ROWS = [
    _row("prompts", "lists of 64 prompts, and of 1,024 inputs", lists()),
    _row("texts", "large texts at once", texts()),
    _row("strings", "the strings of many tokens", strings()),
]
