"""CONTRIBUTING.md names files and folders that are there, and every invariant that a test cites is defined."""

from __future__ import annotations

import re

from architecture.source import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LOOKS_LIKE_A_PATH = re.compile(r"`((?:server|engine|kernels|benchmarks|lab|configs|demo|tests)/[\w./-]*|[A-Z]+\.md)`")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_path_in_the_text_exists():
    assert not [path for path in LOOKS_LIKE_A_PATH.findall(TEXT) if not (ROOT / path).exists()]


def test_every_folder_of_the_code_is_on_the_map():
    folders = {"server/quire", "server/quire_server", "kernels/quire_kernels", "kernels/csrc"}
    folders |= {"benchmarks", "lab/quire_lab", "configs", "demo/make_demo", "tests"}
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
