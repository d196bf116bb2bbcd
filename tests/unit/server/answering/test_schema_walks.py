"""What a schema accepts can be written under its grammar, and what it rejects cannot: texts against another validator.

A model that writes freely spells and orders a valid answer in its own way. A grammar that forbids that way pushes it
into a wrong neighbour, so every refusal of a valid text needs a reason that docs/api.md gives.
"""

from __future__ import annotations

from functools import cache

import pytest

from quire_engine.demo import demo_model_path
from support import sample_tokenizers
from support.covering import few
from support.drawn_documents import accepts
from support.grammar_walks import Walker, Walks, rules_of
from support.walked_schemas import INTEGER, NUMBER, SCHEMAS, TEXT, Schema, of_object

TOKENIZERS = ("byte_level", "sentencepiece", "unigram")
TEXTS_AT_LENGTH = 10_000
READ_FILE = SCHEMAS["read_file"]
MANY = of_object({f"p{i}": INTEGER for i in range(70)})

# What can be written beside what is drawn: the spellings of numbers, and inputs that have failed.
WRITABLE: list[tuple[Schema, str]] = [
    (NUMBER, "1.5e3"),
    (NUMBER, "-0.0"),
    (NUMBER, "1E-7"),
    (INTEGER, "1e2"),
    (INTEGER, "100.0"),
    ({"const": 9007199254740993}, "9007199254740993"),
    ({"enum": [1234567890123456789, 1234567890123456790]}, "1234567890123456790"),
    (READ_FILE, '{"path": "a.txt", "limit": 9, "offset": 5}'),
    (READ_FILE, '{"path": "a.txt", "limit": 9, "offset_1": 5, "offset": 5}'),
    ({"type": "object"}, r'{"a": "caf\u00e9 \u003cb\u003e \ud83d\ude00 \/"}'),
    ({"type": "string", "format": "date"}, '"2024-02-29"'),
    ({"enum": ["a <think> b"]}, '"a <think> b"'),
]
# Valid texts that cannot be written, by what docs/api.md says of them.
BOUNDS: list[tuple[str, Schema, str]] = [
    ("a space, or a line's end and at most 32 blanks", {"type": "array"}, "[1,  2]"),
    ("a space, or a line's end and at most 32 blanks", {"type": "array"}, "[\n" + " " * 33 + "1]"),
    ("undeclared names come after the required ones", READ_FILE, '{"x": 1, "path": "a"}'),
    ("the first 64 properties come before the next 64", MANY, '{"p69": 1, "p0": 1}'),
    ("and there no other name begins as a declared one does", MANY, '{"p1x": 1}'),
    ("letters of ASCII stand for themselves in constants", {"const": "ab"}, r'"\u0061b"'),
    ("and in declared names", READ_FILE, r'{"\u0070ath": "a"}'),
    ("at most six zeros", INTEGER, "1.0000000"),
    ("an exponent up to 18 after an integer", INTEGER, "1e19"),
    ("an exponent up to 18 after an integer", INTEGER, "1.5e1"),
    ("an exponent up to 18 after an integer", INTEGER, "10e-1"),
    ("beyond 15 digits they are written as digits alone", {"const": 9007199254740993}, "9007199254740993.0"),
    ("numbers with bounds have exponents from -9 to 18", {"type": "number", "minimum": 0}, "1e19"),
    ("other numbers any of at most three digits, the first of them 0", NUMBER, "1e100"),
    ("multiples that are no power of ten have no exponent", {"type": "integer", "multipleOf": 7}, "7e1"),
]
# Invalid texts beside those that are drawn.
UNWRITABLE: list[tuple[Schema, str]] = [
    ({"type": "string", "format": "date"}, '"2023-02-29"'),
    ({"const": 9007199254740993}, "9007199254740992"),
    (of_object({"a": {"const": "x"}}, "a", more=INTEGER), r'{"a": "x", "\u0061": 5}'),
    (of_object({"a": TEXT}, more=False), '{"a": "x", "b": 1}'),
    ({"type": "integer", "minimum": 9007199254740993}, "9007199254740992"),
    (TEXT, r'"\ud83d"'),
    (TEXT, r'"\ude00\ud83d"'),
    ({"type": "string", "maxLength": 1}, r'"\ud83d\ude00x"'),
]


@cache
def walkers() -> dict[str, Walker]:
    """The embedded model's tokenizer, and others of the kinds that models use."""
    found = {name: Walker.of(getattr(sample_tokenizers, name)().to_str()) for name in TOKENIZERS}
    return {"demo": Walker.of((demo_model_path() / "tokenizer.json").read_text("utf-8")), **found}


@pytest.mark.parametrize("seed", few(range(2), 0))
def test_what_is_valid_can_be_written_and_nothing_else(seed: int):
    walks = Walks(walkers())
    walks.over_all_schemas(seed)
    assert walks.faults == [], walks.counts
    assert walks.counts["valid"] >= len(SCHEMAS) < walks.counts["broken"]


@pytest.mark.parametrize(("schema", "text"), WRITABLE, ids=[text for _, text in WRITABLE])
def test_usual_spellings_can_be_written(schema: Schema, text: str):
    assert accepts(schema, text)
    assert [walker.along_own_tokens(rules_of(schema), text) for walker in walkers().values()] == [None] * len(walkers())


@pytest.mark.parametrize(("schema", "text"), UNWRITABLE, ids=[text for _, text in UNWRITABLE])
def test_what_is_invalid_cannot_be_written(schema: Schema, text: str):
    assert not accepts(schema, text)
    assert all(walker.refuses(rules_of(schema), text) for walker in walkers().values())


@pytest.mark.parametrize(("words", "schema", "text"), BOUNDS)
def test_bounds_are_those_that_are_documented(words: str, schema: Schema, text: str):
    assert accepts(schema, text)
    assert all(walker.refuses(rules_of(schema), text) for walker in walkers().values()), words


@pytest.mark.schemas
@pytest.mark.timeout(3600)
def test_10000_valid_texts_can_be_written_and_nothing_else():
    walks, seed = Walks(walkers()), 100
    while walks.counts["valid"] < TEXTS_AT_LENGTH:
        walks.over_all_schemas(seed)
        seed += 1
    print(walks.counts, flush=True)
    assert walks.faults == [], walks.counts
