"""Nothing that runs, unpickles or evaluates data is reachable in the packages, under whatever name it is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import reduce

import pytest

from architecture.source import modules, of, tree

PACKAGES = ("quire", "quire_server", "quire_engine", "quire_kernels", "quire_bench", "quire_lab")
# Whole modules: importing one is enough.
MODULES = frozenset(
    {
        *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "imp"),
        *("code", "codeop", "pty", "xmlrpc", "multiprocessing.connection", "multiprocessing.managers"),
    }
)
# Functions by their full names, and builtins by their own.
CALLS = frozenset(
    {
        *("eval", "exec", "__import__", "compile", "builtins.eval", "builtins.exec", "builtins.__import__"),
        *("torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "numpy.load"),
        *("torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline", "torch.serialization.load"),
        *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"),
        *("yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"),
        *("os.system", "os.popen", "os.execl", "os.spawnl", "subprocess.getoutput", "subprocess.getstatusoutput"),
        *("asyncio.create_subprocess_shell", "tempfile.mktemp", "runpy.run_path", "runpy.run_module"),
    }
)
BY_NAME = MODULES | {call.rsplit(".", 1)[-1] for call in CALLS} - {"load", "compile"}  # for `getattr` and the like
# Arguments that may only be false.
FLAGS = frozenset({"shell", "trust_remote_code", "allow_pickle"})
# `python -O` takes asserts away: what decides about anything that came from outside raises instead. All that may be
# asserted is what a type checker cannot see, and not even that where requests, files and keys are looked at.
GUARDS = (
    *("quire_server.http", "quire_server.settings", "quire_server.checkpoint", "quire_server.routes"),
    *(
        "quire_server.text",
        "quire_server.engine",
        "quire_server.commands",
        "quire_lab.commands",
        "quire_engine.process",
    ),
    *("quire_engine.execution.models", "quire_kernels.cpu"),
)


def found(source: ast.Module) -> Iterator[str]:
    """What is forbidden in a module, by line."""
    names = _names(source)
    for node in ast.walk(source):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from _imported(node)
            case ast.Attribute() | ast.Name():
                if (name := _full_name(node, names)) in CALLS:
                    yield f"{node.lineno}: {name}"
            case ast.keyword(arg=str(flag), value=value) if flag in FLAGS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield f"{value.lineno}: {flag}={ast.unparse(value)}"
            case ast.Call(func=ast.Name(id="getattr" | "import_module"), args=[*_, ast.Constant(value=str(name))]):
                if name in BY_NAME:
                    yield f"{node.lineno}: {name} by its name"


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        name = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        parents = [name[: end.start()] for end in re.finditer(r"\.|$", name)]
        if MODULES & set(parents) or name in CALLS:
            yield f"{node.lineno}: import of {name}"


def _names(source: ast.Module) -> dict[str, str]:
    """What a module's own names stand for: `import torch as t` makes `t` stand for `torch`."""
    names: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """`t.load` -> `torch.load`; the empty string for what is no plain name. A method of ours is none of these."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return reduce(lambda left, right: f"{left}.{right}", reversed(parts), names.get(node.id, node.id))


def asserts(source: ast.Module, *, typed: bool) -> Iterator[int]:
    """The lines of asserts; with `typed` only of those that say more than which type a value has."""
    for node in ast.walk(source):
        if isinstance(node, ast.Assert) and not (typed and _is_about_a_type(node.test)):
            yield node.lineno


def _is_about_a_type(test: ast.expr) -> bool:
    match test:
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_forbidden_is_reachable(package: str):
    assert {module: list(found(tree(module))) for module in of(package) if list(found(tree(module)))} == {}


def test_no_assert_guards_anything():
    guards = [name for name in modules() if any(name == each or name.startswith(f"{each}.") for each in GUARDS)]
    assert len(guards) > 40, "the folders have other names now"
    lines = {name: list(asserts(tree(name), typed=name not in guards)) for name in modules()}
    assert {name: found for name, found in lines.items() if found} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as harmless",
        "from pickle import loads",
        "import cloudpickle.compat",
        "from multiprocessing import managers",
        "def late():\n    import marshal",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load as y\ny(path)",
        "from torch import jit\njit.load(path)",
        "from torch.utils import cpp_extension as e\ne.load_inline(name)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "eval(text)",
        "run = exec",
        "from builtins import eval as harmless",
        "import builtins\nbuiltins.exec(text)",
        "import os\nos.system(text)",
        "from os import popen as p",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "run(text, shell=is_windows)",
        "load(path, trust_remote_code=True)",
        "import numpy as np\nnp.load(path)",
        "getattr(builtins, 'eval')",
        "import_module('pickle')",
        "__import__('pickle')",
    ],
)
def test_what_is_planted_is_found(planted: str):
    assert list(found(ast.parse(planted)))


@pytest.mark.parametrize(
    "fine",
    [
        "import json\njson.loads(text)",
        "import yaml\nyaml.safe_load(text)",
        "import re\nre.compile(text)",
        "self.load(path)\nmodel.eval()",
        "subprocess.run(words, shell=False)",
        "from quire_kernels.cpu.library import load\nload(path)",
        "import torch\ntorch.compile(model)",
    ],
)
def test_what_is_fine_is_not(fine: str):
    assert not list(found(ast.parse(fine)))


def test_a_planted_assert_is_found():
    planted = ast.parse(
        "def check(key):\n    assert key in keys\n    assert isinstance(key, str)\n    assert key is not None"
    )
    assert list(asserts(planted, typed=True)) == [2]
    assert list(asserts(planted, typed=False)) == [2, 3, 4]


# Modules that may read files otherwise than by `plain_files`: each has files of its own, or the system's.
READS_FILES = {
    "quire_engine.machine": "/proc and /sys",
    "quire_engine.quality_store": "a trusted folder",
    "quire_engine.execution.proven_paths": "a trusted folder, and the kernels' own files",
    "quire_engine.cost_model": "a command's own file",
    "quire_engine.execution.models.checkpoint": "/proc/self/maps",
    "quire_server.http.memory": "/proc/self/statm",
    "quire_server.checkpoint.gguf_folder": "its own lock",
    "quire_server.batches.store": "its own folder",
    "quire_server.batches.runner": "its own folder",
    "quire_server.batches.input": "its own folder",
    "quire_server.routes.pages": "the package's own files",
    "quire_server.cli": "/dev/null",
    "quire_server.metrics.usage": "its own new file",
    "quire_server.programs.batch_launch": "a command's own files",
    "quire_server.checkpoint.trained": "its own new file",
}
COMMANDS = ("quire_server.commands", "quire_engine.tools")  # run by whom the files belong to


def read_files(source: ast.Module) -> Iterator[int]:
    """The lines that open or read a file by its path."""
    for node in ast.walk(source):
        match node:
            case ast.Call(func=ast.Attribute(attr="read_text" | "read_bytes"), args=[]):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(value=str(mode))]) if "b" in mode:
                yield node.lineno
            case ast.Call(func=ast.Name(id="open")):
                yield node.lineno


def test_files_that_others_name_are_opened_in_one_place():
    """A pipe must hold up no reader, a large file must fill none: `plain_files` sees to both."""
    readers = {name for name in [*of("quire_server"), *of("quire_engine")] if list(read_files(tree(name)))}
    assert {name for name in readers if not any(name.startswith(each) for each in COMMANDS)} == set(READS_FILES)


def test_a_planted_read_is_found():
    planted = ast.parse(
        "path.read_text(encoding='utf-8')\nfile.read_bytes()\npath.open('rb')\nopen(path)\nread_plain(path)"
    )
    assert list(read_files(planted)) == [1, 2, 3, 4]
