"""Docstrings read alone in an index: they begin with a verb or a noun, and no paragraph in the middle of a sentence."""

from __future__ import annotations

import ast
import re

import pytest

from architecture.source import modules, tree, within

PACKAGES = ("quire", "quire_server", "quire_engine", "quire_kernels", "quire_bench", "quire_lab")
# No docstring begins with a preposition, a pronoun, a conjunction or a relative clause: what it belongs to is missing.
FIRST_WORDS = re.compile(
    r"(Of|As|By|For|With|Without|In|On|To|From|At|Into|Under|Over|Through|Between|Within|Among|Upon|Around|Behind"
    r"|Beside|Except|Against|During|Like|Until|Unless|After|Before|Since|While|Because|If|So|Such|Than|Instead|Out|Up"
    r"|And|But|Or|The same|This|That|These|It|Its|They|Their|There|Where|Wherever|When|Whenever|Which|Whichever)\b"
)
# No paragraph of a docstring begins with these either.
OPENINGS = re.compile(r"(What|Whatever|Who|Whoever|Whom|Whose|Those)\b")
# A sentence or paragraph that begins with one of these in lower case has lost its beginning.
BEHEADED = re.compile(
    r"(?:^|(?<=[a-z`)][.?!])(?<!e\.g\.)(?<!i\.e\.) )(?:an?|the|it|its|they|this|is|are|was|and|or|but|which|with) "
)


def docstrings(module: str) -> list[tuple[str, str]]:
    """(name, text) of the module, its classes and its functions, be they public or not."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (getattr(node, "name", "header"), ast.get_docstring(node) or "")
        for node in ast.walk(tree(module))
        if isinstance(node, kinds)
    ]


def fragments(texts: list[tuple[str, str]]) -> list[str]:
    return [f"{name}: {text}" for name, text in texts if is_fragment(text)]


def is_fragment(docstring: str) -> bool:
    parts = [" ".join(part.split()) for part in docstring.split("\n\n")]
    return bool(FIRST_WORDS.match(parts[0])) or any(OPENINGS.match(part) or BEHEADED.search(part) for part in parts)


def test_docstrings_read_alone():
    found = {module: fragments(docstrings(module)) for module in sorted(modules()) if within(module, PACKAGES)}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Of the layer that has most.", True),
        ("As `encode`, for pairs.", True),
        ("The same for statistics.", True),
        ("Where a socket listens.", True),
        ("Until something has come.", True),
        ("It loses its blocks.", True),
        ("What was held.", True),
        ("Those of the last step.", True),
        ("Runs steps. it is started by the server.", True),
        ("x [T, K] -> [T, N]. Raises ValueError.", False),
        ("Whether the pool, e.g. the last one, is full.", False),
        ("Waits for a block.\n\nWith `seconds` at most so long.", False),
        ("Waits for a block.\n\nWhat comes later is lost.", True),
    ],
)
def test_a_fragment_is_found(text: str, expected: bool):
    assert is_fragment(text) == expected
