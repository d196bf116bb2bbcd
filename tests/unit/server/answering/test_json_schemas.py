"""Schemas as they are met: each is enforced to the letter or refused for a reason that docs/api.md lists.

A writer without any sense stands for all models: it takes tokens at random, and ends where it may.
"""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher, LLParserLimits

from quire_engine.contract.grammar_limits import GRAMMAR_LIMITS
from quire_engine.demo import demo_model_path
from quire_server.answering.constraining.constraints import constraint
from quire_server.answering.options import GenerationOptions, PromptOptions, Structure
from quire_server.errors import BadRequest
from quire_server.text.grammar_check import Grammar, GrammarCheck
from support.covering import few
from support.grammars import TOKENS
from support.json_schemas import FILES, KEPT, REFUSED, errors, schema

MOST_TOKENS = 600
WRITERS = 4
CLOSING = frozenset(b'"}],:0123456789 @.')


def grammar(name: str) -> Grammar:
    structure = Structure(kind="json_schema", value=json.dumps(schema(name)))
    options = GenerationOptions(prompt=PromptOptions(source=["x"], param="prompt"), structure=structure)
    found = constraint(options, tool_format=None, thinking=None, token_id=TOKENS.token_id)
    assert found is not None
    return found.grammar


def written(rules: str, seed: int) -> str | None:
    """A text that obeys the rules; None when it did not end in time. What has been long is brought to an end."""
    tokenizer, choice = TOKENS.tokenizer(), random.Random(seed)
    pieces = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
    closing = [token_id for token_id, piece in enumerate(pieces) if piece and CLOSING.issuperset(piece)]
    matcher = LLMatcher(tokenizer, rules, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    ids: list[int] = []
    while len(ids) < MOST_TOKENS and not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_accepting() and choice.random() < 0.5:
            break
        allowed = [token_id for token_id in range(3, len(pieces)) if mask[token_id // 8] >> token_id % 8 & 1]
        ends = set(allowed).intersection(closing)
        if ends and choice.random() < (0.3 if len(ids) < 60 else 0.9):
            allowed = sorted(ends)
        ids.append(choice.choice(allowed))
        assert matcher.consume_token(ids[-1])
    return tokenizer.decode_str(ids) if matcher.is_accepting() else None


def test_the_corpus_is_large():
    assert len(FILES) >= 80
    assert len(KEPT) >= 60
    assert set(REFUSED) <= set(FILES)


@pytest.mark.parametrize("name", few(KEPT, *list(KEPT)[::9]))
def test_whatever_is_written_is_valid(name: str):
    rules = grammar(name).rules
    texts = [text for seed in range(WRITERS) if (text := written(rules, seed)) is not None]
    assert texts, "every writer was cut off"
    for text in texts:
        assert errors(name, text) == [], text


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_each_passes_the_check_or_is_refused_for_its_reason(anyio_backend: str):
    check = GrammarCheck(demo_model_path(), [2])
    refused = {}
    for name in FILES:
        try:
            await check.accept(grammar(name), param="response_format")
        except BadRequest as error:
            refused[name] = error.message
    check.close()
    assert set(refused) == set(REFUSED)
    for name, words in REFUSED.items():
        assert words in refused[name]
