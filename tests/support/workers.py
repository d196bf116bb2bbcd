"""The table of workers in docs/operations.md: each process, thread and task, and who notices when it fails."""

from __future__ import annotations

import re
from typing import NamedTuple

from support.documents import section

KINDS = ("process", "thread", "task")


class Worker(NamedTuple):
    """One name of the table, with its row's cells."""

    kind: str
    name: str
    work: str
    ends: str
    noticed: str
    seen: str


def workers() -> list[Worker]:
    """All names of the three tables, in order."""
    found: list[Worker] = []
    kind = ""
    for line in section("docs/operations.md", "Processes, threads and what each owns").splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        if not cells:
            kind = ""
        elif cells[0] in KINDS:
            kind = cells[0]
        elif kind and not cells[0].startswith("---"):
            found += [Worker(kind, name, *cells[1:]) for name in re.findall(r"`([^`]+)`", cells[0])]
    return found


def known(kind: str, name: str) -> Worker | None:
    """The row of a process, thread or task with this name, which a number or an address may follow."""
    rows = [each for each in workers() if each.kind == kind]
    return next((each for each in rows if re.fullmatch(rf"{re.escape(each.name)}([-_]?\d.*| .*)?", name)), None)
