"""The README's first screen: its numbers are measured results with a command, its pictures are there and small."""

from __future__ import annotations

import re

import pytest

from quire_bench.arguments import parse_arguments
from support.documents import ROOT, section, text

PICTURES = [f"docs/{page}-{colours}.png" for page in ("chat", "dashboard") for colours in ("light", "dark")]
MOST_BYTES = 100_000  # of each


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the one table whose first heading this is."""
    (found,) = re.findall(rf"^\| {first} \|[^\n]*\n\| ---[^\n]*\n((?:\|[^\n]*\n)+)", page, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found.splitlines()]


HEADLINE = "benchmarks/results/headline.md"
ROWS = table(section(HEADLINE, "Headline"), "what")


def section_of(link: str) -> str:
    """Return the section of the results that a link of the table leads to, such as `[GPU](gpu.md#gpu-2026-11-22)`."""
    ((page, anchor),) = re.findall(r"\(([^)#]*)#([^)]*)\)", link)
    results = text(f"benchmarks/results/{page}" if page else HEADLINE)
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", results, re.MULTILINE | re.DOTALL))
    return next(
        body for title, body in sections.items() if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor
    )


def test_the_readme_shows_what_was_measured() -> None:
    shown = table(text("README.md"), "measured")
    assert any("SmolLM2" in row[0] for row in shown), "not only random weights"
    assert shown == [row[:5] for row in ROWS]
    assert any("worse" in row[3] for row in shown), "not only what is better"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_its_command_and_its_section(row: list[str]) -> None:
    *_, command, link = row
    words = re.fullmatch(r"`(?:make real-bench|quire bench ([^`]*))`", command)
    assert words is not None
    if words[1] is not None:
        parse_arguments(re.sub(r"\b[UP](?=,)", "http://127.0.0.1:8000", words[1]).split())
    section = section_of(link)
    for cell in row[1:4]:
        for number in re.findall(r"\d[\d,.]*\d", cell):
            assert number in section, f"{number} is not in {link}"


def test_the_pictures_are_small() -> None:
    sizes = [(ROOT / name).stat().st_size for name in PICTURES]
    assert min(sizes) > 10_000
    assert max(sizes) < MOST_BYTES
    assert all(name in text("README.md") for name in PICTURES)
