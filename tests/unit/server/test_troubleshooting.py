"""docs/troubleshooting.md quotes what the server says: its messages stand in the source, its codes in the errors."""

from __future__ import annotations

import inspect
import re

import pytest

from quire_server import errors
from support.documents import ROOT, text

PAGE = text("docs/troubleshooting.md")
STARTS = PAGE.split("\n## The server does not start\n")[1].split("\n## ")[0]
SOURCE = " ".join(
    path.read_text(encoding="utf-8") for part in ("server", "engine") for path in sorted((ROOT / part).rglob("*.py"))
)


@pytest.mark.parametrize("message", re.findall(r"^\| `([^`]+)` \|", STARTS, re.MULTILINE))
def test_messages_are_what_a_start_says(message: str) -> None:
    """Each part between values: numbers, addresses and names differ."""
    joined = re.sub(r'"\s*\n?\s*f?"', "", SOURCE)
    parts = re.split(r"\.\.\.|127\.0\.0\.1:8000: Address already in use|smollm2 |kv_memory=", message)
    assert any(len(part) > 8 for part in parts)
    for part in parts:
        assert part.strip() in joined, part


@pytest.mark.parametrize("status_and_code", re.findall(r"\b([45]\d\d) `([a-z_]+)`", PAGE))
def test_codes_are_those_of_the_errors(status_and_code: tuple[str, str]) -> None:
    status, code = status_and_code
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ApiError)]
    known = {(str(kind.status), kind.default_code) for kind in kinds}
    particular = re.search(rf"^\| {status} \| [^|]*`{code}`", text("docs/api.md"), re.MULTILINE)
    assert (status, code) in known or particular is not None
