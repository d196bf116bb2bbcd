"""The documents for users: README.md, SERVING.md and the folder docs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")))
FOR_USERS = ("README.md", "SERVING.md", *PAGES)


def text(name: str) -> str:
    """One document, by its path below the repository's root."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """What stands under a heading of the second level, up to the next one."""
    return text(name).split(f"\n## {title}\n")[1].split("\n## ")[0]
