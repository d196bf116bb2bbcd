"""How large modules, classes and functions may be, and which small modules have a reason to be one.

A module holds one idea, told whole: a module that is imported by one or two others of its package belongs into one of
them, unless it is chosen by its name, is an entry point, or stands in the list below with its reason.
"""

from __future__ import annotations

import ast

import pytest

from architecture.source import ROOT, imports, modules, of, tree

MOST_LINES = 700  # of a module
MOST_CLASS_LINES = 400
MOST_FUNCTION_LINES = 50  # without signature and docstring: what fits a screen
SMALL = 60  # lines; a module with fewer needs importers or a reason
IMPORTERS = 3  # of a small module that needs no other reason
# Tables are as long as what they list: half a table would only need a search.
TABLES = {
    "server/quire_server/metrics/metric_catalog.py",
    "demo/make_demo/exchanges.py",
}
# Functions that list what they declare, or that are one kernel of a device, which no call may cut.
LONG_FUNCTIONS = {
    "quire_bench.arguments.build_parser": "a list of flags",
    "quire_kernels.triton.choose.choose": "the launches of one op, in their order",
    "quire_kernels.triton.prefill_attention.prefill_tile": "one kernel",
    "quire_server.dialects.options.generation_options": "a list of fields",
    "quire_server.metrics.metric_catalog.__init__": "a list of metrics",
    "quire_server.metrics.metrics.__init__": "a list of metrics",
    "quire_server.metrics.replica_metrics.__init__": "a list of metrics",
}
# Small modules that are chosen by their names: an instruction set, a kernel set, a command, a dialect's routes.
CHOSEN_BY_NAME = (
    *("quire_server.commands", "quire_server.routes", "quire_engine.tools", "quire_kernels.triton"),
    *(f"quire_server.dialects.{name}" for name in ("chat", "completions", "infill", "messages", "vectors")),
    *("quire_kernels.cpu.provider", "quire_kernels.reference.provider"),
)
REASONS = {
    "quire.progress": "the one place of the library that draws progress bars",
    "quire_engine.execution.drafting.choice": "what settings allow, asked before any drafter is made",
    "quire_engine.execution.numerics": "the name that a plan, stored blocks and replicas agree on",
    "quire_engine.grammar_limits": "what the engine and the server must agree on, and nothing else",
    "quire_engine.process.faults": "a process without faults does not load it",
    "quire_kernels.cpu.kv_layout": "asked before any kernel, or torch, is loaded",
    "quire_kernels.reference.rope": "the specification of one op",
    "quire_server.answering.deep_check": "a health check of its own, chosen by a parameter",
    "quire_server.engine.request_names": "a name is chosen before there is a client of the engine",
    "quire_engine.simulation.guessing": "the drafter of simulations, beside the loop that asks it",
    "quire_server.engine.nodes.model_digest": "names that a node gives and a front compares",
    "quire_server.logs.throughput": "the lines of a start need it, which comes before HTTP is imported",
    "quire_server.metrics.adapter_metrics": "a sample whose labels change, beside the table of metrics",
    "quire_server.metrics.prefill_cost": "an estimate of its own in the table of metrics",
    "quire_server.settings.faults": "the spelling of one setting, which two groups of settings read",
    "quire_server.text.fault_points": "a server without faults does not load it",
}


def importers(module: str) -> set[str]:
    return {name for name in modules() if module in imports(name)}


def is_entry_point(module: str) -> bool:
    """Whether it is run, not imported."""
    is_guarded = any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in ast.walk(tree(module))
    )
    return is_guarded or module.endswith("__main__") or not importers(module)


def is_small(module: str) -> bool:
    path = modules()[module]
    return path.name != "__init__.py" and len(path.read_text("utf-8").splitlines()) < SMALL


def has_reason(module: str) -> bool:
    is_chosen = any(module == name or module.startswith(f"{name}.") for name in CHOSEN_BY_NAME)
    return is_chosen or module in REASONS or is_entry_point(module) or len(importers(module)) >= IMPORTERS


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    statements = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (node.end_lineno or 0) - statements[0].lineno + 1


def test_no_file_is_longer_than_one_can_read():
    folders = ("benchmarks", "demo", "tests")
    paths = {*modules().values(), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))}
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES and name not in TABLES} == {}


def test_classes_and_functions_fit():
    classes, functions = {}, {}
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno + 1 > MOST_CLASS_LINES:
                classes[f"{module}.{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > MOST_FUNCTION_LINES:
                functions[f"{module}.{node.name}"] = body_lines(node)
    assert classes == {}
    assert {name: lines for name, lines in functions.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) <= set(functions), "these fit a screen by now"


def test_small_modules_have_a_reason():
    assert [module for module in modules() if is_small(module) and not has_reason(module)] == []
    assert [module for module in REASONS if module not in modules() or not is_small(module)] == []


@pytest.mark.parametrize("package", ["quire_engine.scheduling"])
def test_the_scheduler_stays_one_house(package: str):
    """Few rooms and few doors: what only watches, in `log`, is counted apart."""
    rooms = {name for name in of(package) if not name.startswith(f"{package}.log")} - {package}
    doors = sum(len(imports(name) & rooms) for name in rooms)
    # The last are `speculation`, which plans drafts behind the plan, `kept_prefixes`, which acts before the queue,
    # `decode_columns`, where plain decodes live, `step_results`, which is what follows a step, and `recorded_pool`,
    # which writes down for the next engine what the blocks hold.
    assert len(rooms) <= 25
    assert doors <= 87
