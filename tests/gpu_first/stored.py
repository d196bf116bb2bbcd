"""Checkpoints served with matrices as they are stored, against the same numbers in float32: `... stored FORM DEVICE`.

Promises: real servers over HTTP; where rounding cannot decide between two tokens, both have the same one. Must not
know: how the engine computes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_first import answers
from gpu_first.answers import MEMORY, Answer, Differs, at_once, served
from quire_bench.own_server import own_server
from support.gguf_models import make_gguf
from support.model_steps import random_ids
from support.quantised import FORMS, make_quantised

ANSWERS, TOKENS = 8, 32
LEAD = 0.5  # nats by which the likeliest token leads where rounding does not change it
LEAST = 64  # tokens that are to be equal, of all answers together
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}  # rows of whole blocks
KINDS = {"attn_output": "Q8_0", "attn": "Q4_K", "ffn_down": "Q6_K", "ffn": "Q4_1", "token_embd": "Q8_0"}
Make = Callable[[Path], tuple[Path, Path]]


def kind(name: str, shape: tuple[int, ...]) -> str:
    """Several types in one file, as llama.cpp mixes them; matrices of one product have the same."""
    if len(shape) == 1:
        return "F32"
    return next((kind for part, kind in KINDS.items() if part in name), "Q8_0")


def requests() -> list[Answer]:
    return [
        {
            "prompt": random_ids(9 + 5 * i, i, vocab_size=400),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        for i in range(ANSWERS)
    ]


def equal_tokens(found: Answer, expected: Answer) -> int:
    """The tokens before the first one that differs. Raises Differs where rounding cannot be the reason."""
    likeliest = expected["logprobs"]["top_logprobs"]
    for place, (ours, theirs) in enumerate(zip(found["token_ids"], expected["token_ids"], strict=True)):
        lead = max(likeliest[place].values()) - min(likeliest[place].values())
        if ours != theirs and lead > LEAD:
            raise Differs(f"token {place} is {ours}, not {theirs}, which leads by {lead:.2f} nats")
        if ours != theirs:
            return place
    return len(found["token_ids"])


async def _compare(device: str, make: Make) -> str:
    with tempfile.TemporaryDirectory() as folder:
        stored, dense = make(Path(folder))
        exact = ("--device", "cpu", "--set", "kernels=reference", "--dtype", "float32", *MEMORY)

        async def expected() -> list[Answer]:
            async with own_server([str(dense), *exact]) as url:
                return await at_once(url, requests())

        async def found() -> list[Answer]:
            async with served(device, model=str(stored)) as url:
                return await at_once(url, requests())

        pairs = zip(*await asyncio.gather(found(), expected()), strict=True)
    equal = [equal_tokens(*pair) for pair in pairs]
    if sum(equal) < LEAST:
        raise Differs(f"only {sum(equal)} tokens could be compared: nothing was shown")
    return f"{sum(equal)} of {ANSWERS * TOKENS} tokens equal, the others after one that rounding may change"


async def gguf(device: str) -> str:
    """A file with matrices in Q4_K, Q6_K, Q8_0 and Q4_1."""
    return await _compare(device, lambda folder: make_gguf(folder, kinds=kind, **WIDE))


async def awq(device: str) -> str:
    """A directory with matrices in AWQ's 4 bits."""
    return await _compare(device, lambda folder: make_quantised(folder, FORMS["awq"]))


WHAT = {"gguf": gguf, "awq": awq}


def main(argv: Sequence[str]) -> int:
    """See `answers.main`."""
    return answers.main(argv, WHAT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
