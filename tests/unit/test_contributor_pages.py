"""docs/architecture.md and the pages in folders of the source name only what is there, and every wait has its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from architecture.source import PACKAGES, modules
from quire_engine.contract.types import WAIT_REASONS
from quire_engine.scheduling.log.request_life import Phase
from quire_lab.commands.diagnosis import causes
from quire_server.app import ROUTERS
from quire_server.commands import COMMANDS
from quire_server.metrics.metrics import Metrics
from quire_server.settings import Settings, spelled
from support.documents import FOLDER_PAGES, ROOT, section, text

ARCHITECTURE = "docs/architecture.md"
SUPPORT = tuple(sorted((ROOT / "tests/support").glob("*.py")))
# Where a path in the text may begin.
STARTS = ("", "server/quire_server", "engine/quire_engine", "engine", "kernels", "lab")
NOT_A_WAIT = "quantisation: answers are not the model's"  # of the causes that `quire doctor` names
ON_THE_WAY = {"transfer", "files"}  # what a request waits for before the scheduler knows it
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def spans(name: str) -> list[str]:
    """Every code span of a page, each once."""
    return list(dict.fromkeys(CODE.findall(FENCE.sub("", text(name)))))


@cache
def sources() -> dict[Path, str]:
    """The source of the packages and of what tests share."""
    return {path: path.read_text(encoding="utf-8") for path in (*modules().values(), *SUPPORT)}


@cache
def files_that_define(name: str) -> frozenset[Path]:
    """The files that have a class, a function, an attribute or a constant of this name."""
    defined = re.compile(rf"\s*(async def|def|class) {name}\b|\s*{name}: |[^#=]*\b{name}\b[^=]* = |\s*self\.{name}: ")
    return frozenset(
        path
        for path, source in sources().items()
        if name in source and any(name in line and defined.match(line) for line in source.split("\n"))
    )


@cache
def members(name: str) -> frozenset[str]:
    """What classes of this name define, with their bases."""
    found: set[str] = set()
    for path in files_that_define(name):
        for node in ast.walk(ast.parse(sources()[path])):
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= set(_defined_in(node))
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id != name:
                        found |= members(base.id)
    return frozenset(found)


def _defined_in(node: ast.ClassDef) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


@cache
def exported() -> str:
    return "\n" + Metrics("tiny").render().decode()


def is_a_flag(span: str, _page: str) -> bool:
    return span.partition("=")[0] in {spelled(name) for name in Settings.model_fields}


def is_a_metric(span: str, _page: str) -> bool:
    return any(f"\n# TYPE {name} " in exported() for name in (span, span.removesuffix("_total")))


def is_a_route(span: str, _page: str) -> bool:
    return span in {getattr(route, "path", "") for router in ROUTERS for route in router.routes}


def is_a_command(span: str, _page: str) -> bool:
    program, name, *_ = span.split()
    if program == "quire":
        return name in COMMANDS
    if program == "python":
        return name == "-m" and span.split()[2] in modules()
    return program == "make" and bool(re.search(rf"^{name}:", text("Makefile"), re.MULTILINE))


def is_a_path(span: str, page: str) -> bool:
    starts = [(ROOT / page).parent, *(ROOT / start for start in STARTS)]
    return any((start / span).exists() for start in starts) or span in {path.name for path in sources()}


def is_a_name(span: str, _page: str) -> bool:
    """Whether a module, a class, a function or an attribute has this name, with what it is said to belong to."""
    *before, last = span.split(".")
    if span in modules() or not before:
        return bool(files_that_define(last)) or any(name.rpartition(".")[2] == last for name in modules())
    owner, folder = ".".join(before), ".".join(before[:-1])
    if owner in modules():
        return modules()[owner] in files_that_define(last)
    if span.startswith("quire") and folder not in modules():
        return False
    return last in members(before[-1]) or any(path.stem == before[-1] for path in files_that_define(last))


KINDS = (
    (r"--[a-z-]+", is_a_flag),
    ("|".join(PACKAGES), is_a_name),
    (r"(quire_|vllm:)[a-z0-9_:]+", is_a_metric),
    (r"/\S*", is_a_route),
    (r"\S+( \S+)+", is_a_command),
    (r"\S*/\S*|\S+\.(py|md)", is_a_path),
    (r"\w+(\.\w+)*", is_a_name),
)


def is_there(span: str, page: str) -> bool:
    """Whether there is what a code span names."""
    return next((check(span, page) for form, check in KINDS if re.fullmatch(form, span)), False)


@pytest.mark.parametrize("page", [ARCHITECTURE, *FOLDER_PAGES])
def test_every_name_is_in_the_source(page: str) -> None:
    assert [span for span in spans(page) if not is_there(span, page)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "Scheduler.schedul",
        "KVAllocater",
        "planer.py",
        "quire_kv_waits_total",
        "--itl",
        "/debug/nothing",
        "make tea",
        "quire tea",
        "quire_server.engine.supervisor.Supervisor.nothing",
        "max_nothing",
        "RequestStream.submit",
        "a sentence",
    ],
)
def test_a_wrong_name_is_seen(wrong: str) -> None:
    assert not is_there(wrong, ARCHITECTURE)


@pytest.mark.parametrize("page", FOLDER_PAGES[:-1])
def test_a_page_begins_with_the_rules_of_access(page: str) -> None:
    assert re.findall(r"^## (.*)$", text(page), re.MULTILINE) == ["Access rules", "Interface", "Algorithm"]


def waits() -> list[list[str]]:
    """The rows of the table of a stream's waits."""
    rows = [line for line in section(ARCHITECTURE, "The waits of a stream").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_every_phase_and_reason_of_a_wait_has_a_row() -> None:
    told = {tuple(part.strip() for part in row[4].split(",")) for row in waits() if row[4]}
    assert {phase for phase, *_ in told} == {*get_args(Phase)} - {"done"}
    assert {reason for phase, *rest in told for reason in rest if phase == "queue"} == {*WAIT_REASONS}
    assert {reason for phase, *rest in told for reason in rest if phase == "transit"} == ON_THE_WAY


def test_every_cause_that_the_doctor_names_has_a_row() -> None:
    named = set(re.findall(r'^ +name="([^"]+)"', Path(causes.__file__).read_text(encoding="utf-8"), re.MULTILINE))
    assert len(named) > 10
    told = {part.strip() for row in waits() for part in row[5].split(";") if part.strip()}
    beginnings = {name.partition(":")[0] for name in named - {NOT_A_WAIT}}
    assert told == beginnings


def test_every_wait_has_a_metric() -> None:
    assert [row[0] for row in waits() if "`quire_" not in row[3]] == []
