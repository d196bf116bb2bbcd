"""The project's source as the architecture's tests read it: modules, their imports, their folders.

Promises: everything is found in the tree; there is no list of modules to keep.
Must not know: any rule.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "quire": ROOT / "server",
    "quire_server": ROOT / "server",
    "quire_engine": ROOT / "engine",
    "quire_kernels": ROOT / "kernels",
    "quire_bench": ROOT / "benchmarks",
    "quire_lab": ROOT / "lab",
}


@cache
def modules() -> dict[str, Path]:
    """All modules of the project by dotted name."""
    found = {}
    for package, root in PACKAGES.items():
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def text(module: str) -> str:
    return modules()[module].read_text(encoding="utf-8")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(text(module), filename=str(modules()[module]))


@cache
def imports(module: str, *, when_loaded: bool = False) -> frozenset[str]:
    """Full names of what a module imports; with `when_loaded` without what it imports later or for types only."""
    nodes = list(_loaded(tree(module))) if when_loaded else list(ast.walk(tree(module)))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules() else node.module)
    return frozenset(names)


@cache
def loaded_by_name(module: str) -> frozenset[str]:
    """Full names of modules that a module hands to `import_module`, itself or out of tables, its own or imported."""
    if "import_module" not in text(module):
        return frozenset()
    tables = [module, *(imports(module) & modules().keys())]
    nodes = chain.from_iterable(ast.walk(tree(each)) for each in tables)
    names = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(name for name in names if "." in name and name in modules())


def entries(folder: str, imported: Callable[[str], frozenset[str]] = imports) -> dict[str, set[str]]:
    """The folder's entries, each with those that it imports. Its `__init__` is an entry of its own."""
    depth = folder.count(".") + 1

    def entry(module: str) -> str:
        return "__init__" if module == folder else module.split(".")[depth]

    inside = frozenset(of(folder))
    arrows: dict[str, set[str]] = {entry(module): set() for module in inside}
    for module in inside:
        mine = entry(module)
        arrows[mine] |= {entry(name) for name in imported(module) if name in inside} - {mine}
    return arrows


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _loaded(child)


def of(package: str) -> list[str]:
    return sorted(name for name in modules() if within(name, (package,)))


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def reachable(module: str) -> set[str]:
    """Everything that is loaded with a module, third-party packages included; packages load their `__init__`."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            todo += imports(name, when_loaded=True)
            todo += [parent for parent in _parents(name) if parent in modules()]
    return seen


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def is_folder(name: str) -> bool:
    return modules()[name].name == "__init__.py"
