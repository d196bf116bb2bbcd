"""Every thread, process and background task that the code can start has a row in docs/operations.md, and no row is left
over: what ends it, who notices, what clients see.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from architecture.source import ROOT, modules, tree, within
from support.workers import known, workers
from walk.trials import FAULTS, RECORD, Trial

PRODUCT = tuple(name for name in modules() if not within(name, ("quire_bench", "quire_lab")))
THREADS = {"Thread", "ThreadPoolExecutor", "LoadThread"}
TASKS = {"create_task", "begin"}
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PROCESSES = {"Popen", "create_subprocess_exec", "posix_spawn"}
# Where processes are started, and which.
STARTS = {
    "quire_server.engine.process": {"quire_engine.process"},
    "quire_server.engine.json_child": {"quire_engine.tools"},
    "quire_server.api_servers.process": {"quire_server.api_servers"},
    "quire_server.text.worker_process": {"template_worker.py", "grammar_worker.py"},
    "quire_server.text.tokenizer_process": {"tokenizer_worker.py"},
    "quire_engine.execution.prover_process": {"quire_engine.tools"},
    "quire_engine.execution.parallel.processes": {"quire_engine.process.rank"},
    "quire_engine.execution.parallel.devices": {"quire_engine.process.device_rank"},
}
# Names that no call has as a literal: libraries' own, and those that a variable has.
BY_LIBRARIES = {
    ("thread", name)
    for name in (
        *("AnyIO worker thread", "asyncio", "uvloop"),
        *("OtelBatchSpanRecordProcessor", "OtelPeriodicExportingMetricReader"),
    )
}
OTHERWISE = {("thread", "kv writer"), ("thread", "kv reader")}  # of a loop over both
NAMELESS = {"quire_engine.execution.load_thread", "quire_engine.execution.kv.prefix_files"}  # whose name is a variable


def calls(module: str, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and called(node) in names:
            yield node


def called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=ast.Name(id=name)):
            return name
    return ""


def literal(node: ast.expr) -> str | None:
    """A string, one with values in it as if the first one was 0."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return f"{text}0"
    return None


def name_of(call: ast.Call) -> str | None:
    given = [each.value for each in call.keywords if each.arg in {"name", "thread_name_prefix"}]
    return next((found for each in (*given, *call.args) if (found := literal(each)) is not None), None)


def named(kind: str, names: set[str]) -> Iterator[tuple[str, ast.Call, str | None]]:
    for module in PRODUCT:
        for call in calls(module, names):
            if kind == "task" and name_of(call) is None:
                continue  # it ends with the request or the call that has begun it
            yield module, call, name_of(call)


@pytest.mark.parametrize(("kind", "names"), [("thread", THREADS), ("task", TASKS)])
def test_each_thread_and_named_task_has_a_row(kind: str, names: set[str]):
    missing = [
        f"{module}:{call.lineno}: {name or 'it has no name'}"
        for module, call, name in named(kind, names)
        if (name is None or known(kind, name) is None) and (kind == "task" or module not in NAMELESS)
    ]
    assert not missing, f"a {kind} without a row in docs/operations.md"


def test_each_process_has_a_row():
    found = {module for module in PRODUCT for _ in calls(module, PROCESSES)}
    assert found == set(STARTS)
    for name in set().union(*STARTS.values()):
        assert known("process", name), name


def test_native_threads_are_where_the_table_says():
    """Compute threads, and one that has the system commit memory ahead; both end with their owner."""
    files = [*(ROOT / "kernels" / "csrc").rglob("*.cpp"), *(ROOT / "kernels" / "csrc").rglob("*.h")]
    found = {path.stem for path in files if re.search(r"std::j?thread\b(?!::)|pthread_create", path.read_text())}
    assert found == {"pool", "commit"}


def test_no_row_is_left_over():
    real = {("process", name) for each in STARTS.values() for name in each} | {("process", "quire serve")}
    for kind, names in (("thread", THREADS), ("task", TASKS)):
        for _, _, name in named(kind, names):
            row = known(kind, name or "")
            real |= set() if row is None else {(row.kind, row.name)}
    assert {(each.kind, each.name) for each in workers()} == real | BY_LIBRARIES | OTHERWISE


def test_the_walk_asks_each_part_the_same_questions():
    """`make worker-walk` tries each fault on each part, or says why that cannot be."""
    assert set(RECORD) == {(each.kind, each.name) for each in workers()}
    for part, tried in RECORD.items():
        assert set(tried) == set(FAULTS), part
        assert all(isinstance(each, Trial) or len(each) > 10 for each in tried.values()), part


def test_what_the_walk_plants_is_in_the_source():
    """Else the fault would be tried on a function that there is not, which only the long run would tell."""
    for tried in RECORD.values():
        for each in (trial for trial in tried.values() if isinstance(trial, Trial)):
            for planted in each.plants:
                module, _, path = planted["target"].partition(":")
                names = {node.name for node in ast.walk(tree(module)) if isinstance(node, DEFINITIONS)}
                assert set(path.split(".")) <= names, planted["target"]


def test_each_row_tells_all():
    for each in workers():
        assert each.work, each.name
        assert each.ends, each.name
        assert each.noticed, each.name
        assert each.seen, each.name
