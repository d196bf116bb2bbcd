"""CONTRIBUTING.md names files and folders that are there, and every invariant that a test cites is defined."""

from __future__ import annotations

import re

import pytest

from architecture.source import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LOOKS_LIKE_A_PATH = re.compile(r"`((?:server|engine|kernels|benchmarks|configs|demo|tests)/[\w./-]*|[A-Z]+\.md)`")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


RECIPES = [line for line in section("Recipes").splitlines() if line.startswith("| a")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda line: line.split("|")[1].strip())
def test_the_files_of_a_recipe_exist(recipe: str):
    paths = LOOKS_LIKE_A_PATH.findall(recipe)
    assert len(paths) >= 2
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_there_is_a_recipe_for_everything_that_is_often_added():
    added = {line.split("|")[1].strip() for line in RECIPES}
    assert added >= {
        *("a sampling parameter", "a metric", "a setting", "a limit of the scheduler", "a dialect"),
        *("an order of the queue", "an op", "a kernel set", "an instruction set", "a kind of weight"),
    }


def test_every_path_in_the_text_exists():
    assert not [path for path in LOOKS_LIKE_A_PATH.findall(TEXT) if not (ROOT / path).exists()]


def test_every_folder_of_the_code_is_on_the_map():
    folders = {"server/quire", "server/quire_server", "kernels/quire_kernels", "kernels/csrc"}
    folders |= {"benchmarks", "configs", "demo/make_demo", "tests"}
    folders |= {
        f"engine/quire_engine/{path.name}"
        for path in (ROOT / "engine/quire_engine").iterdir()
        if (path / "__init__.py").exists() and path.name != "demo"
    }
    assert {path for path in folders if f"`{path}`" not in section("Folders")} == set()


def test_invariants_are_defined_where_tests_cite_them():
    cited: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        cited |= set(re.findall(r"\bI(?:[1-9]|1[0-9]|20)\b", text))
    defined = set(re.findall(r"^ +(I\d+)\*? +[a-z]", (ROOT / INVARIANTS).read_text(encoding="utf-8"), re.MULTILINE))
    assert cited
    assert cited <= defined


INVARIANTS = "engine/quire_engine/scheduling/scheduler.py"
