"""The corpus of JSON schemas in tests/data, and what a validator of another make says of values."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from jsonschema import FormatChecker
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for

FOLDER = Path(__file__).parents[1] / "data/json_schemas"
FILES = {path.stem: path for folder in ("agents", "schemastore") for path in sorted((FOLDER / folder).glob("*.json"))}
REFUSED: dict[str, str] = json.loads((FOLDER / "refused.json").read_text("utf-8"))
KEPT = [name for name in FILES if name not in REFUSED]
_FORMATS = ["date", "email", "ipv4", "ipv6", "uuid"]  # that the validator knows without further packages


def schema(name: str) -> dict[str, object]:
    read: dict[str, object] = json.loads(FILES[name].read_text("utf-8"))
    return read


def errors(name: str, text: str) -> list[str]:
    """What is wrong with an answer under the schema as its authors wrote it."""
    return [error.message for error in _validator(name).iter_errors(json.loads(text))]


@cache
def _validator(name: str) -> Validator:
    kind = validator_for(schema(name), default=Draft202012Validator)
    return kind(schema(name), format_checker=FormatChecker(_FORMATS))
