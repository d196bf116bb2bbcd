"""The documents for users (README.md, SERVING.md and the folder docs), and the pages in folders of the source."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")))
# The index of what was measured, and its pages.
RESULTS = (
    "benchmarks/RESULTS.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks/results").glob("*.md")),
)
FOR_USERS = ("README.md", "SERVING.md", *PAGES)
# One page in each folder whose rules of access a newcomer must know.
FOLDER_PAGES = (
    "engine/quire_engine/execution/kv/README.md",
    "engine/quire_engine/execution/gpu/README.md",
    "engine/quire_engine/links/README.md",
    "engine/quire_engine/scheduling/README.md",
    "lab/quire_lab/README.md",
    "server/quire_server/engine/README.md",
    "server/quire_server/http/README.md",
    "tests/support/README.md",
)


def text(name: str) -> str:
    """One document, by its path below the repository's root."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """What stands under a heading of the second level, up to the next one."""
    return text(name).split(f"\n## {title}\n")[1].split("\n## ")[0]
