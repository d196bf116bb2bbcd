"""Walls between the project's classes and modules, counted in the source: foreign privates, hidden imports, circles.

`make walls` prints each place as path:line, then the totals; `test_walls.py` holds them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from architecture.source import PACKAGES, ROOT, entries, imports, is_folder, loaded_by_name, modules, text, tree, within

Place = tuple[int, str]  # a line's number, and what is found there
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Underscores that are part of a documented interface: named tuples', ctypes', the standard library's.
PUBLIC = frozenset({"_replace", "_fields", "_asdict", "_make", "_fields_", "os._exit"})
# Attributes of transformers' modules and configurations, for which there is no public name: in one folder only.
FALLBACK = "quire_engine.execution.models.fallback"
TRANSFORMERS = frozenset(
    {
        *("_apply_gate", "_default_apply_gate", "_experts_implementation", "_experts_implementation_internal"),
        *("_from_config", "_decode_special_floats", "_tied_weights_keys", "_keys_to_ignore_on_load_unexpected"),
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_buffers", "_parameters"),
    }
)
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr", "__setattr__", "__getattribute__"}
_ALIKE = {"copy", "deepcopy", "replace", "type"}

# Whatever `foreign_privates` finds, and more: an underscore behind anything but self and cls, in a string or an import,
# or a function of a module that calls its argument self.
_MAY_BE_FOREIGN = re.compile(
    r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]|[\"']_[a-zA-Z]|\bimport\b.*\b_[a-zA-Z]|^\s+_\w+(?: as \w+)?,|"
    r"^(?:async )?def \w+\((?:self|cls)\b",
    re.MULTILINE,
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """What belongs to the code at a place: the class around it, and the names that stand for its instances."""

    owner: str = ""  # the class; empty outside of any
    bases: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()  # of the class, with instances of it as values
    methods: frozenset[str] = frozenset()  # of the class, that return an instance of it
    own: frozenset[str] = frozenset()  # variables that stand for the class or an instance of it
    of_module: frozenset[str] = frozenset()  # names that the module defines at its top

    def owns(self, value: ast.expr) -> bool:
        """Whether a value is of the class around the code, or a name of its module."""
        return self.is_own(value) or (
            isinstance(value, ast.Name) and (value.id in self.of_module or value.id in self.bases)
        )

    def is_own(self, value: ast.expr) -> bool:
        """Whether a value is the class around the code, or an instance of it."""
        match value:
            case ast.Name(id=name):
                return name in self.own
            case ast.Attribute(value=holder, attr=name):
                return name in self.attributes and self.is_own(holder)
            case ast.Call(func=function, args=given):
                return self._returns_own(function, any(map(self.is_own, given[:1])))
        return False

    def _returns_own(self, function: ast.expr, takes_own: bool) -> bool:
        match function:
            case ast.Name(id="super"):
                return self.owner != ""
            case ast.Name(id=name):  # the class itself, or a function that returns one like its argument
                return name in self.own or (takes_own and name in _ALIKE)
            case ast.Attribute(attr="__new__"):
                return takes_own
            case ast.Attribute(value=holder, attr=name):
                return name in self.methods and self.is_own(holder)
        return False

    def names_owner(self, annotation: ast.expr | None) -> bool:
        """Whether an annotation is the class around the code, or that or None."""
        if annotation is None or not self.owner:
            return False
        return re.fullmatch(rf"['\"]?({self.owner}|Self)( \| None)?['\"]?", ast.unparse(annotation)) is not None

    def in_class(self, node: ast.ClassDef) -> _Scope:
        bases = frozenset(base.id for base in node.bases if isinstance(base, ast.Name))
        scope = replace(self, owner=node.name, bases=bases, own=frozenset({node.name}), attributes=frozenset())
        methods = [each for each in node.body if isinstance(each, _FUNCTIONS)]
        returning = frozenset(each.name for each in methods if scope.names_owner(each.returns))
        scope = replace(scope, methods=returning)
        values = {
            target.id
            for target, _, annotation in _assigned(node)
            if isinstance(target, ast.Name) and scope.names_owner(annotation)
        }
        for method in methods:
            values |= scope.in_function(method, is_method=True).attributes_set(method)
        return replace(scope, attributes=frozenset(values))

    def attributes_set(self, method: _Function) -> set[str]:
        """Return the attributes to which a method assigns an instance of the class."""
        return {
            target.attr
            for target, value, annotation in _assigned(method)
            if isinstance(target, ast.Attribute) and self.is_own(target.value)
            if self.names_owner(annotation) or (value is not None and self.is_own(value))
        }

    def in_function(self, node: _Function | ast.Lambda, *, is_method: bool = False) -> _Scope:
        given = [*node.args.posonlyargs, *node.args.args]
        every = [*given, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
        local = {each.arg for each in every}
        own = {each.arg for each in every if self.names_owner(each.annotation)}
        if is_method and given and not any(ast.unparse(each) == "staticmethod" for each in _decorators(node)):
            own.add(given[0].arg)
        scope = replace(self, own=self.own - local | own)
        for target, value, annotation in _assigned(node):
            if isinstance(target, ast.Name):
                local.add(target.id)
                if scope.names_owner(annotation) or (value is not None and scope.is_own(value)):
                    scope = replace(scope, own=scope.own | {target.id})
        return replace(scope, of_module=self.of_module - local)


def _decorators(node: _Function | ast.Lambda) -> list[ast.expr]:
    return [] if isinstance(node, ast.Lambda) else node.decorator_list


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """(target, value, annotation) of the assignments in a function, without those of the functions in it."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                continue
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _unpacked(target, value)
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                yield target, value, annotation
            case ast.NamedExpr(target=target, value=value):
                yield target, value, None
            case ast.For(target=target) | ast.AsyncFor(target=target) | ast.comprehension(target=target):
                yield from _unpacked(target, None)
            case ast.withitem(optional_vars=ast.expr() as target):
                yield from _unpacked(target, None)
        yield from _assigned(child)


def _unpacked(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None, None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value, None
        return
    values: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, ast.Tuple) and len(value.elts) == len(values):
        values = [*value.elts]
    for each, its_value in zip(target.elts, values, strict=True):
        yield from _unpacked(each, its_value)


def foreign_privates(source: ast.Module, allowed: frozenset[str] = PUBLIC) -> list[Place]:
    """Find where `x._y` is read, written or imported, and x is neither of the class around it nor of its module."""
    top = {node.name for node in source.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    top |= {target.id for target, _, _ in _assigned(source) if isinstance(target, ast.Name)}
    found = _privates(source, _Scope(of_module=frozenset(top)))
    return sorted((line, what) for name, line, what in found if not allowed & {name, what})


def _privates(node: ast.AST, scope: _Scope) -> Iterator[tuple[str, int, str]]:
    """(name, line, what) of each private in a node that is foreign there."""
    match node:
        case ast.Attribute(value=value, attr=name) if is_private(name) and not scope.owns(value):
            yield name, node.lineno, ast.unparse(node)
        case ast.Call(
            func=ast.Name(id=function) | ast.Attribute(attr=function), args=[value, ast.Constant(value=str(name)), *_]
        ) if function in _BY_STRING and is_private(name) and not scope.owns(value):
            yield name, node.lineno, ast.unparse(node)
        case ast.ImportFrom(module=module, names=names):
            for alias in names:
                if is_private(alias.name):
                    yield alias.name, node.lineno, f"from {module} import {alias.name}"
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef():
                inside = scope.in_class(child)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                inside = scope.in_function(child, is_method=isinstance(node, ast.ClassDef))
            case _:
                inside = scope
        yield from _privates(child, inside)


def spilled_methods(source: ast.Module) -> list[Place]:
    """Find functions of a module that touch privates of their first argument, an instance of a class of the module."""
    classes = {node.name for node in source.body if isinstance(node, ast.ClassDef)}
    found = []
    for node in source.body:
        if isinstance(node, _FUNCTIONS) and (given := [*node.args.posonlyargs, *node.args.args]):
            first = given[0]
            of = set(re.findall(r"\w+", ast.unparse(first.annotation))) if first.annotation else set[str]()
            if of & classes and any(_is_private_of(each, first.arg) for each in ast.walk(node)):
                found.append((node.lineno, node.name))
    return found


def _is_private_of(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=of), attr=attribute):
            return of == name and is_private(attribute) and attribute not in PUBLIC
    return False


def imports_by_name(source: ast.Module) -> list[Place]:
    """Find where `import_module` is given a name that is not plainly another project's: one of ours, or a variable."""
    found = []
    for node in ast.walk(source):
        match node:
            case ast.Call(func=function, args=[name, *_]) if _is_import_module(function) and not _is_of_others(name):
                found.append((node.lineno, ast.unparse(node)))
            case ast.Call(args=[function, name, *_]) if _is_import_module(function) and not _is_of_others(name):
                found.append((node.lineno, ast.unparse(node)))  # in a thread
    return found


def _is_import_module(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "import_module"
    return False


def _is_of_others(named: ast.expr) -> bool:
    match named:
        case ast.Constant(value=str(name)):
            return name.split(".")[0] not in PACKAGES
    return False


def circles(arrows: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Return the largest sets of names of which each reaches every other, in order."""
    reached = {name: _reached(name, arrows) for name in arrows}
    found = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in arrows}
    return sorted(names for names in found if len(names) > 1)


def _reached(name: str, arrows: Mapping[str, Iterable[str]]) -> set[str]:
    seen, todo = set[str](), [name]
    while todo:
        for other in arrows[todo.pop()]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def every_import(module: str) -> frozenset[str]:
    """Return what a module imports anywhere: at its top, in functions, for types, and by names as strings."""
    return imports(module) | loaded_by_name(module)


def circles_of_modules() -> list[tuple[str, ...]]:
    return circles({name: every_import(name) & modules().keys() for name in modules()})


def circles_of_folders() -> dict[str, list[tuple[str, ...]]]:
    """Return the circles between the direct entries of each folder that has any."""
    folders = sorted({*PACKAGES, *(name for name in modules() if is_folder(name))})
    found = {folder: circles(entries(folder, every_import)) for folder in folders}
    return {folder: names for folder, names in found.items() if names}


def _foreign_of(module: str) -> list[Place]:
    if not _MAY_BE_FOREIGN.search(text(module)):
        return []  # most modules, in a tenth of the time
    return foreign_privates(tree(module), PUBLIC | TRANSFORMERS if within(module, (FALLBACK,)) else PUBLIC)


KINDS: dict[str, Callable[[str], list[Place]]] = {
    "foreign private": _foreign_of,
    "function that is a method": lambda module: spilled_methods(tree(module)),
    "import by name": lambda module: imports_by_name(tree(module)) if "import_module" in text(module) else [],
}


@cache
def places(kind: str) -> dict[str, list[Place]]:
    """Return the places of a kind in each module that has any."""
    found = {module: KINDS[kind](module) for module in sorted(modules())}
    return {module: each for module, each in found.items() if each}


def main() -> None:
    totals = []
    for kind in KINDS:
        found = places(kind)
        for module, each in found.items():
            path = modules()[module].relative_to(ROOT)
            print("\n".join(f"{path}:{line}: {kind}: {what}" for line, what in each))
        totals.append(f"{kind}: {sum(map(len, found.values()))} in {len(found)} modules")
    of_modules, of_folders = circles_of_modules(), circles_of_folders()
    for names in of_modules:
        print(f"circle of modules: {' '.join(names)}")
    for folder, each in of_folders.items():
        print("\n".join(f"circle in {folder}: {' '.join(names)}" for names in each))
    totals.append(
        f"circle: {len(of_modules)} of modules, {sum(map(len, of_folders.values()))} between folders' entries"
    )
    print("", *totals, sep="\n")


if __name__ == "__main__":
    main()
