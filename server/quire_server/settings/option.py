"""How a setting is declared: what `--help` and the documents say of it lies beside its type and default.

Promises: a setting that is a secret is never printed. Must not know: which settings there are.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field
from pydantic.config import JsonDict

T = TypeVar("T")


def option(default: T, group: str, description: str, unit: str = "", *, secret: bool = False) -> T:
    """A field with the group and unit that `--help` and the documents show; a secret is never printed."""
    extra: JsonDict = {"group": group, "unit": unit, "secret": secret}
    return Field(default, description=description, json_schema_extra=extra, repr=not secret)
