"""What is asked of the trained models, and what transformers computed of it in float32, as `real.record` wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
RECORDED = _FOLDER / "recorded.json"
PROSE = (_FOLDER / "prose.txt").read_text(encoding="utf-8")
PROMPTS = (
    "The three most important things to know about the sea are",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "In the morning the children walked up the hill to the school, where the new teacher",
)
GREEDY_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The most likely tokens after a prompt."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # of the log-probabilities of the two most likely tokens, one a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One model's numbers."""

    token_ids: list[int]  # of the prose, with what the tokenizer begins a text with
    logprobs: list[float]  # of all tokens but the first
    greedy: list[Answer]


@cache
def recorded(name: str) -> Recorded:
    """The numbers of a model by its short name."""
    found = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    return Recorded(**found | {"greedy": [Answer(**each) for each in found["greedy"]]})
