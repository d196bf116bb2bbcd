"""Docstrings read alone in an index: each paragraph begins with a verb or a noun, not in the middle of a sentence."""

from __future__ import annotations

import ast
import re

import pytest

from architecture.source import modules, tree, within

PACKAGES = ("quire", "quire_server", "quire_engine", "quire_kernels")
# No docstring, nor a paragraph of one, begins with these.
OPENINGS = re.compile(r"(What|Whatever|Who|Whoever|Whom|Whose|Those)\b")
# A sentence or paragraph that begins with one of these in lower case has lost its beginning.
BEHEADED = re.compile(
    r"(?:^|(?<=[a-z`)][.?!])(?<!e\.g\.)(?<!i\.e\.) )(?:an?|the|it|its|they|this|is|are|was|and|or|but|which|with) "
)


def paragraphs(module: str) -> list[tuple[str, str]]:
    """(name, text) of each docstring's paragraphs."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (getattr(node, "name", "header"), " ".join(part.split()))
        for node in ast.walk(tree(module))
        if isinstance(node, kinds)
        for part in (ast.get_docstring(node) or "").split("\n\n")
    ]


def fragments(texts: list[tuple[str, str]]) -> list[str]:
    return [f"{name}: {text}" for name, text in texts if OPENINGS.match(text) or BEHEADED.search(text)]


def test_docstrings_read_alone():
    found = {module: fragments(paragraphs(module)) for module in sorted(modules()) if within(module, PACKAGES)}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "is_fragment"),
    [
        ("What was held.", True),
        ("Those of the last step.", True),
        ("Runs steps. it is started by the server.", True),
        ("x [T, K] -> [T, N]. Raises ValueError.", False),
        ("Whether the pool, e.g. the last one, is full.", False),
    ],
)
def test_a_fragment_is_found(text: str, is_fragment: bool):
    assert bool(fragments([("f", text)])) == is_fragment
