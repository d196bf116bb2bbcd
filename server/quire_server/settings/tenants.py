"""The tenants that a YAML file names: who they are, what they are worth, what they may have.

Promises: a file that is accepted has no name and no key twice, and every number in it can be kept; a message names the
file, the tenant and what would do. It has digests of keys and never a key. Must not know: how limits are kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from quire_server.settings.sources import SettingsError, read_yaml

MAX_TENANTS = 1000  # each is a label of metrics
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
_MAKE_DIGEST = "printf %s KEY | sha256sum"


def _digests(value: object) -> object:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"must be the digest of a key, or a list of them: {_MAKE_DIGEST}")
    for digest in listed:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"a digest is 64 digits of 0-9 and a-f, the SHA-256 of a key: {_MAKE_DIGEST}")
    return tuple(listed)


class TenantEntry(BaseModel):
    """One tenant of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=_NAME)]
    key_sha256: Annotated[tuple[str, ...], BeforeValidator(_digests)]
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    service_class: Literal["interactive", "batch"] = Field("interactive", alias="class")
    requests_per_minute: Annotated[float, Field(ge=0.1, le=1e9)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=1, le=1e12)] | None = None
    max_queued: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_running: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


def read_tenants(path: Path) -> tuple[TenantEntry, ...]:
    """The tenants of a file, `tenants: [{name: ..., key_sha256: ...}, ...]`. Raises ValueError."""
    flag = f"--tenants {path}"
    try:
        values = read_yaml(path, flag)
    except SettingsError as error:
        raise ValueError(str(error)) from None
    listed = values.get("tenants") if isinstance(values, dict) and set(values) == {"tenants"} else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{flag}: expected `tenants:` and a list with `name:` and `key_sha256:` for each")
    if len(listed) > MAX_TENANTS:
        raise ValueError(f"{flag}: {len(listed)} tenants are more than {MAX_TENANTS}")
    entries = tuple(_entry(value, f"{flag}: tenant {number}") for number, value in enumerate(listed, start=1))
    _check_once([entry.name for entry in entries], f"{flag}: two tenants have the name")
    _check_once([digest for entry in entries for digest in entry.key_sha256], f"{flag}: two tenants have the key of")
    return entries


def _entry(value: Any, where: str) -> TenantEntry:
    name = value.get("name") if isinstance(value, dict) else None
    if isinstance(name, str):
        where += f" ({name[:64]!r})"
    try:
        return TenantEntry.model_validate(value)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg'].removeprefix('Value error, ')}".lstrip(": ")
            for each in error.errors()
        ]
        raise ValueError(f"{where}: {'; '.join(problems)}") from None


def _check_once(values: list[str], message: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{message} {value[:64]}")
        seen.add(value)
