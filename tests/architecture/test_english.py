"""Wordings that docstrings and comments do not use: they leave out the subject, or make a person of a thing.

A sentence names its subject with a noun of the field: "The text that was held back", not "What was held".
"""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest

from architecture.source import modules, tree, within

PACKAGES = ("quire", "quire_server", "quire_engine", "quire_kernels")
# No docstring, nor a paragraph of one, begins with these.
OPENINGS = re.compile(r"(What|Whatever|Who|Whoever|Whom|Whose|Those)\b")
# Persons for things, and idioms for operations.
PHRASES = re.compile(
    r"\b(whoever|whom|nobody|somebody|(?:is|are|was|were) told|gets? rid|what becomes of|what of|all else)\b",
    re.IGNORECASE,
)
# A sentence or paragraph that begins with one of these in lower case has lost its beginning.
BEHEADED = re.compile(
    r"(?:^|(?<=[a-z`)][.?!])(?<!e\.g\.)(?<!i\.e\.) )(?:an?|the|it|its|they|this|is|are|was|and|or|but|which|with) "
)

CHECKED = [name for name in sorted(modules()) if within(name, PACKAGES)]


def paragraphs(module: str) -> list[tuple[str, str]]:
    """(name, text) of each docstring's paragraphs."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (getattr(node, "name", "header"), " ".join(part.split()))
        for node in ast.walk(tree(module))
        if isinstance(node, kinds)
        for part in (ast.get_docstring(node) or "").split("\n\n")
    ]


def comments(module: str) -> list[tuple[str, str]]:
    """(line, text) of each comment."""
    lines = io.StringIO(modules()[module].read_text(encoding="utf-8")).readline
    return [
        (str(token.start[0]), token.string)
        for token in tokenize.generate_tokens(lines)
        if token.type == tokenize.COMMENT
    ]


def riddles(texts: list[tuple[str, str]], comments: list[tuple[str, str]]) -> list[str]:
    found = [f"{name}: {text}" for name, text in texts if OPENINGS.match(text) or BEHEADED.search(text)]
    return found + [f"{where}: {text}" for where, text in [*texts, *comments] if PHRASES.search(text)]


@pytest.mark.parametrize("module", CHECKED)
def test_prose_names_its_subject(module: str):
    assert not riddles(paragraphs(module), comments(module))


@pytest.mark.parametrize(
    ("text", "is_riddle"),
    [
        ("What was held.", True),
        ("Those of the last step.", True),
        ("The engine is told.", True),
        ("Runs steps. it is started by the server.", True),
        ("x [T, K] -> [T, N]. Raises ValueError.", False),
        ("Whether the pool, e.g. the last one, is full.", False),
    ],
)
def test_a_riddle_is_found(text: str, is_riddle: bool):
    assert bool(riddles([("f", text)], [])) == is_riddle
