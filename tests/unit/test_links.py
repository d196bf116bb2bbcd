"""Every link between the documents leads to a file that exists, and to a heading that is in it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from support.documents import FOLDER_PAGES, FOR_USERS, PAGES, RESULTS, ROOT, text

DOCUMENTS = (
    *FOR_USERS,
    *FOLDER_PAGES,
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *RESULTS,
    "benchmarks/data/README.md",
)
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(name: str) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", text(name), flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(name: str) -> list[str]:
    found = LINK.findall(CODE.sub("", text(name)))
    return [target for pair in found for target in pair if target and not target.startswith(("http://", "https://"))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for link in links(name):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(ROOT).as_posix()), f"{name}: {link}"


def test_the_check_sees_links() -> None:
    assert anchors("docs/access.md") >= {"keys-that-change", "keys"}
    assert "access.md#keys" in links("docs/settings.md")
    assert len(links("README.md")) >= 5


def test_the_readme_leads_to_every_page() -> None:
    seen = {PurePosixPath(link.partition("#")[0]).as_posix() for link in links("README.md")}
    assert set(PAGES) <= seen


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_what_it_answers(name: str) -> None:
    title, empty, sentence, *_ = text(name).splitlines()
    assert title.startswith("# ")
    assert not empty
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
