"""The limit on a function's body: it fits a screen."""

from __future__ import annotations

import ast

from architecture.source import modules, tree

MOST_LINES = 50  # without signature and docstring
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


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    statements = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (node.end_lineno or 0) - statements[0].lineno + 1


def test_functions_fit_a_screen():
    long = {
        f"{module}.{node.name}": body_lines(node)
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > MOST_LINES
    }
    assert {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "these fit a screen by now"
