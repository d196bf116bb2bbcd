"""The files and batches of the store, as values: their owners, their states, the objects that clients see."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quire_server.batches.usage import BatchUsage

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The client of a file or a batch. `name` tells owners apart; the others say which key its requests have."""

    name: str = ""  # empty on a server without keys, where all clients are one owner
    tenant: str = ""  # where tenants are listed
    key_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file's row. Times are seconds since 1970."""

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None  # None: it is kept until it is deleted

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of an input file, or of one of its lines."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch's row. Times are seconds since 1970."""

    id: str
    owner: Owner
    endpoint: str  # of every line; empty: each line has its own
    input_file: str
    window: str  # as the client has written it, such as 24h
    metadata: dict[str, str] | None
    status: Status
    created_at: int
    expires_at: int
    times: dict[str, int]  # when it came into later states, by their names
    ends_as: Status = "completed"  # the state after `finalizing` or `cancelling`
    model: str | None = None  # of its first line
    total: int = 0  # lines
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    output_seconds: int | None = None  # how long its output files are kept; None: until they are deleted
    usage: BatchUsage | None = None  # of the lines in its output files; None: it has none yet
    problems: tuple[LineProblem, ...] = ()  # of its input, because of which it has failed

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        errors = None
        if self.problems:
            errors = {"object": "list", "data": [msgspec.structs.asdict(each) for each in self.problems]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": None if self.usage is None else self.usage.shown(),
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a batch."""

    number: int  # from 1, as in the input file
    custom_id: str
    offset: int  # of its bytes in the input file
    size: int
