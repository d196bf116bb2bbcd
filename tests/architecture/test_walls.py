"""Walls between classes and modules: no foreign private, no method outside of its class, no hidden import, no circle.

Today's exceptions are listed, by module and number. A list only shrinks: a module with fewer has its number lowered
here, or its line deleted, by the change that mends it. `make walls` prints every place.
"""

from __future__ import annotations

import ast

import pytest

from architecture.source import ROOT, of, text
from architecture.walls import (
    FALLBACK,
    KINDS,
    TRANSFORMERS,
    circles,
    circles_of_folders,
    circles_of_modules,
    foreign_privates,
    imports_by_name,
    main,
    places,
    spilled_methods,
)

EXCEPTIONS = {
    "foreign private": {
        "quire_engine.execution.models.fallback.products": 1,  # torch._C, in the way that torch's pages show
        "quire_server.commands.completion": 1,  # argparse has no public name for a parser's flags
    },
    "function that is a method": {},
    "import by name": {
        "quire_server.cli": 1,
        "quire_server.commands.completion": 1,
    },
}
CIRCLES_OF_MODULES: list[tuple[str, ...]] = []
CIRCLES_OF_FOLDERS: dict[str, list[tuple[str, ...]]] = {}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crosses_a_wall_but_what_is_listed(kind: str):
    found, listed = places(kind), EXCEPTIONS[kind]
    more = {name: each for name, each in found.items() if len(each) > listed.get(name, 0)}
    assert not more, "use or add a public name of the owner; `make walls` prints all places"
    fewer = {name: len(found.get(name, [])) for name in listed if len(found.get(name, [])) < listed[name]}
    assert not fewer, "these are mended: lower or delete their numbers in EXCEPTIONS"


def test_no_circle_but_those_listed():
    """With imports in functions, for types only, and by names as strings."""
    assert circles_of_modules() == CIRCLES_OF_MODULES
    assert circles_of_folders() == CIRCLES_OF_FOLDERS


def test_every_name_of_transformers_is_used():
    """In text: a name that nobody uses any more would allow what comes."""
    sources = "".join(map(text, of(FALLBACK)))
    assert not {name for name in TRANSFORMERS if name not in sources}


IN_A_CLASS = "class A:\n    def f(self, x): "


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (IN_A_CLASS + "return x._y", "x._y"),
        (IN_A_CLASS + "x._y = 1", "x._y"),
        (IN_A_CLASS + "del x.y._z", "x.y._z"),
        (IN_A_CLASS + "return self._x._y", "self._x._y"),
        (IN_A_CLASS + "return self.f(x)._y", "self.f(x)._y"),
        (IN_A_CLASS + "return getattr(x, '_y', None)", "getattr(x, '_y', None)"),
        (IN_A_CLASS + "object.__setattr__(x, '_y', 1)", "object.__setattr__(x, '_y', 1)"),
        ("class A: ...\ndef f(a: A): return a._y", "a._y"),
        ("class B: ...\nclass A:\n    def f(self, b: 'B'): return b._y", "b._y"),
        ("class A:\n    @staticmethod\n    def f(x): return x._y", "x._y"),
        ("import a\na._y()", "a._y"),
        ("from a import _y", "from a import _y"),
        ("def f(self): return self._y", "self._y"),
        ("x = 1\ndef f(x): return x._y", "x._y"),
        ("a: argparse._Group", "argparse._Group"),
    ],
)
def test_a_foreign_private_is_found(planted: str, expected: str):
    assert [what for _, what in foreign_privates(ast.parse(planted))] == [expected]


@pytest.mark.parametrize(
    "harmless",
    [
        IN_A_CLASS + "return self._y, super()._y, A._y, type(self)._y",
        IN_A_CLASS + "return [self._y for each in x if (lambda: self._z)()]",
        IN_A_CLASS + "return x._replace(a=1), x._fields, x.__class__",
        IN_A_CLASS + "other = copy(self); other._y = 1",
        IN_A_CLASS + "return getattr(self, '_y')",
        "class A:\n    def __eq__(self, other: 'A | None'): return self._y == other._y",
        "class A:\n    def f(self):\n        a, b = A(1), A.__new__(A)\n        a._x = b._x",
        "class A:\n    @classmethod\n    def f(of): made = of(); made._y = of._z",
        "class A:\n    def __init__(self): self.x = self\n    def f(self): return self.x._y",
        "class A:\n    x: A | None\n    def f(self): return self.x._y",
        "class A:\n    def g(self) -> A: ...\n    def f(self): return self.g()._y",
        "class A(B):\n    _x = B._x",
        "class A: ...\nx = A()\nx._y, A._y",
        "import os\nos._exit(1)",
    ],
)
def test_what_is_ones_own_is_not_foreign(harmless: str):
    assert foreign_privates(ast.parse(harmless)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A: ...\ndef f(a: A): a._y = 1", ["f"]),
        ("class A: ...\nasync def f(a: 'A | None', b): return a._y()", ["f"]),
        ("class A: ...\ndef f(a: A, b): return b._y, a.y", []),
        ("from m import A\ndef f(a: A): return a._y", []),
        ("class A:\n    def f(self, a: A): return a._y", []),
    ],
)
def test_a_method_outside_of_its_class_is_found(source: str, found: list[str]):
    assert [what for _, what in spilled_methods(ast.parse(source))] == found


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("import_module('quire_server.programs.launch')", True),
        ("importlib.import_module(name)", True),
        ("asyncio.to_thread(import_module, 'quire_server.programs.serving')", True),
        ("import_module('pynvml')", False),
        ("load('quire_server.programs.launch')", False),
    ],
)
def test_an_import_by_name_is_found(call: str, is_found: bool):
    assert bool(imports_by_name(ast.parse(call))) == is_found


def test_circles_are_found_whole():
    arrows = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a", "e"], "e": ["d"], "f": ["f", "a"]}
    assert circles(arrows) == [("a", "b", "c"), ("d", "e")]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_the_command_prints_each_place_and_the_totals(capsys: pytest.CaptureFixture[str]):
    main()
    printed, totals = capsys.readouterr().out.split("\n\n")
    for kind, listed in EXCEPTIONS.items():
        assert f"{kind}: {sum(listed.values())} in {len(listed)} modules" in totals.splitlines()
        lines = [line for line in printed.splitlines() if f": {kind}: " in line]
        assert len(lines) == sum(listed.values())
        assert all((ROOT / line.split(":")[0]).is_file() for line in lines)
    assert printed.count("circle of modules: ") == len(CIRCLES_OF_MODULES)
