"""Walks texts through a compiled grammar token by token, along several tokenizations, as an engine's masks would.

Promises: a walk takes only tokens that the mask allows. Where the grammar itself chooses the only next token, and it
is part of the text, the walk goes on from there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire_engine.contract.grammar_limits import GRAMMAR_LIMITS
from quire_engine.contract.grammar_vocabulary import GrammarVocabulary
from quire_server.answering.constraining.constraints import constraint
from quire_server.answering.options import GenerationOptions, PromptOptions, Structure, Tool, ToolOptions
from quire_server.text.parsing.formats import TOOL_FORMATS
from support.drawn_documents import broken_texts, drawn_text
from support.walked_schemas import SCHEMAS, Schema, drawn_schema

_LONGEST_TOKEN = 32  # bytes of the tokens that a drawn tokenization takes
_DRAWN_SCHEMAS = 12  # of one seed, beside those that have a name
_CALLS = 0.3  # of objects, those that are arguments of a call
_MOST_SHOWN = 20  # faults that are told


@dataclass(frozen=True)
class Walker:
    """One tokenizer's vocabulary, and the grammars that were compiled for it."""

    tokenizer: LLTokenizer
    _compiled: dict[str, LLMatcher] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: str) -> Walker:
        """Read the text of a tokenizer.json as an engine does."""
        return Walker(LLTokenizer(GrammarVocabulary(tokenizer).text))

    def along_own_tokens(self, rules: str, text: str) -> str | None:
        """Walk the tokenizer's own tokens under the masks; the fault, None where all were allowed."""
        matcher = self._matcher(rules)
        rest = text.encode()
        ids = self.tokenizer.tokenize_bytes(rest)
        while ids:
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return matcher.get_error().splitlines()[0]
            token_id = ids.pop(0)
            if not mask[token_id >> 3] >> (token_id & 7) & 1:
                only = _only(mask)
                if only is None or not rest.startswith(self._pieces[only] or b"\xff"):
                    return f"no token for {rest[:24]!r} after {text.encode()[: -len(rest)][-40:]!r}"
                token_id = only
                ids = self.tokenizer.tokenize_bytes(rest[len(self._pieces[only]) :])
            if not matcher.consume_token(token_id):
                return f"a token of the mask is refused at {rest[:24]!r}"
            rest = rest[len(self._pieces[token_id]) :]
        return None if matcher.is_accepting() else "the text may not end"

    def along_drawn_tokens(self, rules: str, text: str, draw: Random) -> str | None:
        """Walk tokens that spell the text in another way, which the grammar's parser must take as well."""
        matcher = self._matcher(rules)
        ids = list(self._drawn_tokens(text.encode(), draw))
        taken = matcher.validate_tokens(ids)
        if taken < len(ids):
            seen = b"".join(self._pieces[each] for each in ids[:taken])
            return f"no token for {text.encode()[len(seen) :][:24]!r} after {seen[-40:]!r}"
        matcher.consume_tokens(ids)
        return None if matcher.is_accepting() else "the text may not end"

    def refuses(self, rules: str, text: str) -> bool:
        """Whether the text cannot be written as a whole: its own tokens are not all taken, or it may not end there."""
        matcher = self._matcher(rules)
        ids = self.tokenizer.tokenize_str(text)
        return matcher.validate_tokens(ids) < len(ids) or not (matcher.consume_tokens(ids) and matcher.is_accepting())

    def _matcher(self, rules: str) -> LLMatcher:
        found = self._compiled.get(rules)
        if found is None:
            limits = LLParserLimits(**GRAMMAR_LIMITS)  # type: ignore[arg-type]
            found = self._compiled[rules] = LLMatcher(self.tokenizer, rules, log_level=0, limits=limits)
            assert not found.is_error(), found.get_error()
        return found.deep_copy()

    def _drawn_tokens(self, text: bytes, draw: Random) -> Iterator[int]:
        longest = draw.choice((1, 2, 4, _LONGEST_TOKEN))
        at = 0
        while at < len(text):
            fitting = [size for size in range(1, min(longest, len(text) - at) + 1) if text[at : at + size] in self._ids]
            size = draw.choice(fitting)
            yield self._ids[text[at : at + size]]
            at += size

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The bytes of each token; none of those that are no text."""
        known = self.tokenizer
        return [b"" if known.is_special_token(each) else known.decode_bytes([each]) for each in range(known.vocab_size)]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token_id for token_id, piece in enumerate(self._pieces) if piece}


def _only(mask: bytes) -> int | None:
    """The one token that a mask allows; None where there are several."""
    found = int.from_bytes(mask, "little")
    return found.bit_length() - 1 if found and not found & (found - 1) else None


def rules_of(schema: Mapping[str, Any]) -> str:
    """The grammar of an answer under the schema, as a request gets it. Raises BadRequest."""
    return _rules(structure=Structure(kind="json_schema", value=json.dumps(schema)))


def rules_of_call(schema: Mapping[str, Any]) -> str:
    """The grammar of a call whose arguments have the schema, of which `call` makes texts. Raises BadRequest."""
    tool = Tool(name="f", parameters=dict(schema), strict=True)
    return _rules(tools=ToolOptions(tools=(tool,), choice="required", parallel=False))


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def _rules(**asked: Any) -> str:
    options = GenerationOptions(prompt=PromptOptions(source=["x"], param="prompt"), **asked)
    found = constraint(options, tool_format=TOOL_FORMATS["hermes"], thinking=None, token_id=lambda _: None)
    assert found is not None
    return found.grammar.rules


@dataclass
class Walks:
    """The counts of walks, and the first faults among them."""

    walkers: Mapping[str, Walker]
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def over_all_schemas(self, seed: int) -> None:
        """Walk a valid text and the broken ones of every schema, named or drawn."""
        draw = Random(seed)
        drawn = {f"drawn {seed}.{i}": drawn_schema(draw) for i in range(_DRAWN_SCHEMAS)}
        for name, schema in (SCHEMAS | drawn).items():
            self._over(f"{name}, seed {seed}", schema, Random(f"{seed} {name}"))

    def _over(self, name: str, schema: Schema, draw: Random) -> None:
        text, broken = drawn_text(schema, draw), list(broken_texts(schema, draw))
        if schema.get("type") == "object" and draw.random() < _CALLS:
            rules, text, broken = rules_of_call(schema), call(text), [(kind, call(wrong)) for kind, wrong in broken]
        else:
            rules = rules_of(schema)
        refused = []
        for tokenizer, walker in self.walkers.items():
            found = (walker.along_own_tokens(rules, text), walker.along_drawn_tokens(rules, text, draw))
            refused += [f"{name}, {tokenizer}: {text!r} is valid: {fault}" for fault in found if fault is not None]
        taken = [
            f"{name}, {tokenizer}: {wrong!r} is invalid ({kind}), and is taken"
            for kind, wrong in broken
            for tokenizer, walker in self.walkers.items()
            if not walker.refuses(rules, wrong)
        ]
        self.counts.update(valid=1, refused=bool(refused), broken=len(broken), taken=bool(taken))
        self.faults += [*refused, *taken][: _MOST_SHOWN - len(self.faults)]
