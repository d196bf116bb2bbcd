"""The lines of a batch's input: where each begins, whatever the file begins with."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

import pytest

from quire_server.batches.input import Inspection, read_lines, request_of
from support.batches import COMPLETIONS, line, lines_of


@pytest.mark.parametrize("start", [b"", BOM_UTF8, BOM_UTF8 + b"\r\n", b"\n"])
def test_lines_are_found_where_they_are(tmp_path: Path, start: bytes) -> None:
    file = tmp_path / "input.jsonl"
    file.write_bytes(start + lines_of(line("a", prompt="x"), line("b", prompt="y")))
    found = Inspection()
    chunks = read_lines(file, endpoint=COMPLETIONS, max_line_bytes=1000, knows_model=lambda _: True, found=found)
    lines = [each for chunk in chunks for each in chunk]
    assert (found.problems, [each.custom_id for each in lines]) == ([], ["a", "b"])
    content = file.read_bytes()
    prompts = [request_of(content[each.offset : each.offset + each.size])[1] for each in lines]
    assert [b'"x"' in prompts[0], b'"y"' in prompts[1]] == [True, True]
