"""Public traces of real services: arrival times and lengths, without text.

Promises: rows in order of arrival, the first at 0 s; a file that is neither format is refused with its line.
Reads Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake's JSON lines (timestamp in ms, lengths,
hash ids of prefix blocks). Must not know: servers, how prompts are made.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512  # tokens per hash id


class TraceError(ValueError):
    """A file that is no trace; the text names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request. Equal block numbers stand for equal tokens."""

    at: float  # seconds after the first
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, *, scale_length: float = 1.0) -> tuple[TraceRow, ...]:
    """The rows of a file, lengths multiplied and at least 1. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    lines = text.splitlines()
    read = _mooncake if lines and lines[0].lstrip().startswith("{") else _azure
    rows = read(path, lines, scale_length)
    if not rows:
        raise TraceError(f"{path} has no rows")
    rows.sort(key=lambda row: row.at)
    first = rows[0].at
    return tuple(replace(row, at=row.at - first) for row in rows)


def _azure(path: Path, lines: list[str], scale: float) -> list[TraceRow]:
    table = csv.reader(lines)
    header = tuple(next(table, ()))
    if header != AZURE_COLUMNS:
        raise TraceError(
            f"{path}:1: expected the columns {','.join(AZURE_COLUMNS)} or JSON lines with timestamp, input_length"
            " and output_length"
        )
    rows = []
    for number, cells in enumerate(table, start=2):
        if not cells:
            continue
        try:
            when, context, generated = cells
            at = datetime.fromisoformat(when).timestamp()
            lengths = _scaled(int(context), scale), _scaled(int(generated), scale)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        rows.append(TraceRow(at=at, input_tokens=lengths[0], output_tokens=lengths[1]))
    return rows


def _mooncake(path: Path, lines: list[str], scale: float) -> list[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        rows.append(
            TraceRow(
                at=row.timestamp / 1e3,
                input_tokens=_scaled(row.input_length, scale),
                output_tokens=_scaled(row.output_length, scale),
                blocks=tuple(row.hash_ids),
                block_tokens=math.ceil(MOONCAKE_BLOCK * scale),
            )
        )
    return rows


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
