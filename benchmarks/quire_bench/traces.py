"""Reads recorded or drawn loads: arrival times and lengths, without text.

Promises: rows in order of arrival, the first at 0 s; a file of an unknown format is refused with its line. Reads
Azure's CSV, Mooncake's JSON lines (prefixes as hash ids), ServeGen's clients, tenants of VTC's benchmark, and Quire's
own JSON lines. Must not know: the scheduler.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_CLIENTS = "client,req_time_s,prompt_len,output_len"
MOONCAKE_BLOCK = 512  # tokens per hash id


class TraceError(ValueError):
    """A file that is not a trace; the text names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request. Equal block numbers stand for equal tokens."""

    at: float  # seconds after the first
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    tenant: str = ""
    weight: float = 1.0  # the tenant's weight
    scope: str = ""  # of its cached prefixes; empty: the tenant's own
    speculation: float | None = None  # share of its guessed tokens that are right; None: as of all requests
    max_tokens: int | None = None  # the limit that its client sets; None: it asks for the output's exact length


def read_trace(path: Path, *, scale_length: float = 1.0, seed: int = 0) -> tuple[TraceRow, ...]:
    """The rows of a file, with lengths multiplied and at least 1; `seed` is for files that describe how to draw loads.

    Raises TraceError.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    lines = text.splitlines()
    if lines and lines[0].lstrip().startswith("{"):
        rows = _drawn(path, text, scale_length, seed) if _is_servegen(text) else _json_lines(path, lines, scale_length)
    else:
        rows = (_of_clients if lines and lines[0].startswith(_CLIENTS) else _azure)(path, lines, scale_length)
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
            " and output_length, or with at, input_tokens and output_tokens"
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


def _of_clients(path: Path, lines: list[str], scale: float) -> list[TraceRow]:
    """Results of the fairness benchmark of Sheng et al. (OSDI 2024): arrivals and lengths are used."""
    rows = []
    for number, cells in enumerate(csv.reader(lines[1:]), start=2):
        try:
            at, lengths = float(cells[1]), (_scaled(int(cells[2]), scale), _scaled(int(cells[3]), scale))
        except (ValueError, IndexError) as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        rows.append(TraceRow(at=at, input_tokens=lengths[0], output_tokens=lengths[1], tenant=cells[0]))
    return rows


def _json_lines(path: Path, lines: list[str], scale: float) -> list[TraceRow]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            plain = json.loads(line)
            rows.append((_ours if "input_tokens" in plain else _mooncake)(plain, scale))
        except KeyError as error:
            raise TraceError(f"{path}:{number}: there is no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    return rows


def _mooncake(plain: dict[str, Any], scale: float) -> TraceRow:
    return TraceRow(
        at=float(plain["timestamp"]) / 1e3,
        input_tokens=_scaled(_whole(plain["input_length"]), scale),
        output_tokens=_scaled(_whole(plain["output_length"]), scale),
        blocks=tuple([_whole(number) for number in plain.get("hash_ids", ())]),
        block_tokens=math.ceil(MOONCAKE_BLOCK * scale),
    )


def _ours(plain: dict[str, Any], scale: float) -> TraceRow:
    """`{"at": S, "input_tokens": N, "output_tokens": N}`.

    Optionally with "tenant", "max_tokens", "blocks", "block_tokens" and "speculation".
    """
    block_tokens = _whole(plain.get("block_tokens", 0))
    return TraceRow(
        at=float(plain["at"]),
        input_tokens=_scaled(_whole(plain["input_tokens"]), scale),
        output_tokens=_scaled(_whole(plain["output_tokens"]), scale),
        blocks=tuple([_whole(number) for number in plain.get("blocks", ())]) if block_tokens else (),
        block_tokens=math.ceil(block_tokens * scale),
        tenant=str(plain.get("tenant", "")),
        max_tokens=_scaled(_whole(plain["max_tokens"]), scale) if "max_tokens" in plain else None,
        speculation=_share(plain["speculation"]) if "speculation" in plain else None,
    )


def _share(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"speculation is {value!r}, must be the share of guesses that are right, 0 to 1")
    return float(value)


def _is_servegen(text: str) -> bool:
    try:
        plain = json.loads(text)
    except ValueError:
        return False
    return isinstance(plain, dict) and "clients" in plain


def _drawn(path: Path, text: str, scale: float, seed: int) -> list[TraceRow]:
    """ServeGen: each client's arrivals are a renewal process, and its lengths are drawn from their quantiles."""
    plain, rows = json.loads(text), []
    try:
        for client in plain["clients"]:
            rng = random.Random(f"{seed}/{client['client']}")
            draw = _gaps(client["pattern"], *client["params"])
            at = draw(rng)
            while at < plain["window_s"]:
                rows.append(
                    TraceRow(
                        at=at,
                        input_tokens=_scaled(_quantile(client["input_q5"], rng.random()), scale),
                        output_tokens=_scaled(_quantile(client["output_q5"], rng.random()), scale),
                        tenant=str(client["client"]),
                    )
                )
                at += draw(rng)
    except KeyError as error:
        raise TraceError(f"{path}: a client has no {error}") from None
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from None
    return rows


def _gaps(pattern: str, shape: float, scale: float) -> Callable[[random.Random], float]:
    """The function that draws the next gap between two arrivals of a client."""
    if not (shape > 0 and scale > 0):
        raise ValueError("shape and scale of a client's gaps must be above 0")
    if pattern == "Gamma":
        return lambda rng: rng.gammavariate(shape, scale)
    if pattern == "Weibull":
        return lambda rng: rng.weibullvariate(scale, shape)
    raise ValueError(f"the pattern {pattern!r} is unknown; use Gamma or Weibull")


def _quantile(values: list[float], share: float) -> float:
    """Interpolated between equally spaced quantiles."""
    place = share * (len(values) - 1)
    below = min(int(place), len(values) - 2)
    return values[below] + (values[below + 1] - values[below]) * (place - below)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, got {value!r}")
    return value


def _scaled(tokens: float, scale: float) -> int:
    return max(1, round(tokens * scale))
