"""The syntax of API keys, `KEY`, `NAME=KEY`, `=KEY` or `@FILE` with some of these, and of tenants files."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from quire_engine.contract.errors import ConfigError
from quire_engine.plain_files import read_plain_text
from quire_server.settings.sources import SettingsError, read_yaml

LEAST_NAMED = 8  # characters of a key after a name: a shorter one is probably part of a key that contains an equal sign
_KEY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key, which is never printed, and a name for its owner in the log."""

    name: str = ""
    key: str = field(repr=False)


def parse_key(text: str) -> ApiKey:
    """`NAME=KEY` has a name; `=KEY` and everything else is the key itself. Raises ValueError.

    A key that could be misread as a name is refused, never shortened. Equal signs at the end are base64's, so
    `c2VjcmV0==` is a key; a key with equal signs elsewhere is written `=KEY`.
    """
    name, equals, key = text.partition("=")
    if not text.strip() or (equals and not name and not key):
        raise ValueError("an API key is empty; give the flag a non-empty value or leave it out")
    if not name:
        return ApiKey(key=key)
    if not key.strip("=") or not _KEY_NAME.fullmatch(name):
        return ApiKey(key=text)
    if len(key) < LEAST_NAMED:
        raise ValueError(
            f"an API key is written NAME=KEY with less than {LEAST_NAMED} characters for the key;"
            " take a longer one, or write =KEY for a key that has an equal sign in it"
        )
    return ApiKey(name=name, key=key)


def key_file(text: str) -> Path | None:
    """The file that `@FILE` names, in place of a key."""
    return Path(text[1:]) if text.startswith("@") else None


def _read_keys(given: Iterable[str], flag: str) -> Iterator[ApiKey]:
    """The keys that a flag has, and those that its files have now. Raises ValueError."""
    for text in given:
        path = key_file(text)
        yield from [parse_key(text)] if path is None else _of_file(path, f"{flag} {text}")


def sent_key(text: str, flag: str) -> str:
    """The key that a command sends to a server for `KEY`, `NAME=KEY`, `=KEY` or the first one of `@FILE`.

    Empty for an empty text. Raises ConfigError.
    """
    try:
        return next(_read_keys([text], flag)).key if text else ""
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _of_file(path: Path, named: str) -> Iterator[ApiKey]:
    """The keys of a file: one a line; lines that are empty or begin with # do not count. Raises ValueError."""
    try:
        lines = list(enumerate(read_plain_text(path).splitlines(), start=1))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise ValueError(f"{named}: cannot be read: {reason}") from None
    keys = [(number, line.strip()) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ValueError(f"{named}: there is no key in it")
    for number, line in keys:
        try:
            yield parse_key(line)
        except ValueError as error:
            raise ValueError(f"{named}: line {number}: {error}") from None


def readable_by_others(path: Path) -> bool:
    """Whether every user of this machine can read the file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


MAX_TENANTS = 1000  # each is a label of metrics
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
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
    """One tenant of the file, with digests of its keys and never a key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=_TENANT_NAME)]
    key_sha256: Annotated[tuple[str, ...], BeforeValidator(_digests)]
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    service_class: Literal["interactive", "batch"] = Field("interactive", alias="class")
    requests_per_minute: Annotated[float, Field(ge=0.1, le=1e9)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=1, le=1e12)] | None = None
    max_queued: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_running: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_day: Annotated[int, Field(ge=1, le=10**15)] | None = None
    tokens_per_month: Annotated[int, Field(ge=1, le=10**15)] | None = None
    prefix_group: Annotated[str, Field(pattern=_TENANT_NAME)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsFile:
    """A tenants file as it was read."""

    tenants: tuple[TenantEntry, ...] = ()
    usage_file: Path | None = None  # counts of tokens that survive a restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """All that lets clients in, as it was read at one time from flags and files."""

    api: tuple[ApiKey, ...] = ()
    admin: tuple[ApiKey, ...] = ()
    tenants: TenantsFile = TenantsFile()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySources:
    """The flags and files from which keys and tenants come."""

    api: tuple[str, ...] = field(repr=False)
    admin: tuple[str, ...] = field(repr=False)
    tenants_file: Path | None

    def read(self) -> Keys:
        """The keys of the flags, and what the files contain now. Raises ValueError naming the file."""
        api, admin = tuple(_read_keys(self.api, "--api-key")), tuple(_read_keys(self.admin, "--admin-api-key"))
        tenants = TenantsFile() if self.tenants_file is None else read_tenants(self.tenants_file)
        return Keys(api=api, admin=admin, tenants=tenants)


def read_tenants(path: Path) -> TenantsFile:
    """The content of `tenants: [{name: ..., key_sha256: ...}, ...]`, and `usage_file: ...`. Raises ValueError.

    Names and keys are unique. A message names the file, the tenant and a remedy. A relative path of `usage_file` begins
    at the folder of the tenants file.
    """
    flag = f"--tenants {path}"
    try:
        values = read_yaml(path, flag)
    except SettingsError as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, dict) or not {"tenants"} <= set(values) <= {"tenants", "usage_file"}:
        values = {}
    listed, usage = values.get("tenants"), values.get("usage_file")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{flag}: expected `tenants:` and a list with `name:` and `key_sha256:` for each")
    if len(listed) > MAX_TENANTS:
        raise ValueError(f"{flag}: {len(listed)} tenants are more than {MAX_TENANTS}")
    entries = tuple(_entry(value, f"{flag}: tenant {number}") for number, value in enumerate(listed, start=1))
    _check_once([entry.name for entry in entries], f"{flag}: two tenants have the name")
    _check_once([digest for entry in entries for digest in entry.key_sha256], f"{flag}: two tenants have the key of")
    if usage is not None and (not isinstance(usage, str) or not usage.strip()):
        raise ValueError(f"{flag}: `usage_file:` must be the path of a file, such as usage.json")
    return TenantsFile(tenants=entries, usage_file=None if usage is None else path.resolve().parent / usage)


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
