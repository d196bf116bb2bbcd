"""The process that a student's file runs in: `python -P host.py FILE SECONDS BYTES`, with calls as lines of JSON.

Promises: the file sees nothing of the judge, which is another process; what it prints goes to stderr; an exception is a
reply with its last line in the file. It is the one place that runs a file, and only one that its user names.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

NAMES = ("BlockPool", "PageTable", "Scheduler")


def main(path: str, cpu_seconds: int, memory_bytes: int) -> int:
    """Answer calls until stdin ends. The limits hold before the file is run, and it cannot raise them."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    objects: dict[int, Any] = {}
    module: ModuleType | None = None
    for line in sys.stdin:
        call = json.loads(line)
        try:
            if module is None:
                module = _load(path)
            reply = {"value": _plain(_carry_out(call, module, objects))}
        except BaseException as error:  # whatever a student's code raises is the reply
            reply = {"raised": _told(error, path)}
        replies.write(json.dumps(reply) + "\n")
    return 0


def _load(path: str) -> ModuleType:
    spec = spec_from_file_location("mine", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = module_from_spec(spec)
    sys.modules["mine"] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def _carry_out(call: dict[str, Any], module: ModuleType, objects: dict[int, Any]) -> object:
    """Carry out one call.

    `classes`: those that the file defines; `make` an object from arguments, `fit` one from what its parameters ask for;
    `names` of an object's attributes, and whether each is a method; `call` a method; `read` an attribute; `extend` one.
    """
    if call["do"] == "classes":
        return [name for name in NAMES if isinstance(getattr(module, name, None), type)]
    if call["do"] in {"make", "fit"}:
        made = getattr(module, call["name"])
        args, kwargs = (
            _fitting(made, call["offers"], objects) if call["do"] == "fit" else (call["args"], call["kwargs"])
        )
        objects[call["of"]] = made(*args, **kwargs)
        return None
    one = objects[call["of"]]
    match call["do"]:
        case "names":
            return {name: callable(getattr(one, name, None)) for name in dir(one) if not name.startswith("__")}
        case "read":
            found = getattr(one, call["name"])
            return found() if callable(found) else found
        case "extend":
            return getattr(one, call["name"]).extend(call["values"])
    method: Callable[..., object] = getattr(one, call["name"])
    return method(*call["args"], **call["kwargs"])


def _fitting(
    made: Callable[..., object], offers: list[dict[str, Any]], objects: dict[int, Any]
) -> tuple[list[object], dict[str, object]]:
    """The offers by the names of the parameters; required ones of other names get the remaining offers in order."""
    left = [(offer["names"], objects[offer["object"]] if "object" in offer else offer["value"]) for offer in offers]
    args: list[object] = []
    kwargs: dict[str, object] = {}
    unknown = []
    for parameter in inspect.signature(made).parameters.values():
        named = next((offer for offer in left if parameter.name in offer[0]), None)
        if named is not None:
            left.remove(named)
            kwargs[parameter.name] = named[1]
        elif parameter.default is parameter.empty and parameter.kind in {
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        }:
            unknown.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_ONLY and left:
            args.append(left.pop(0)[1])
    kwargs |= {name: value for name, (_, value) in zip(unknown, left, strict=False)}
    return args, kwargs


def _plain(value: object) -> object:
    """The value as JSON has it: sequences of any kind as lists, named tuples and dataclasses of slices too."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset) or hasattr(value, "__iter__"):
        return [_plain(inner) for inner in value]
    raise TypeError(f"a {type(value).__name__} cannot be an answer: give numbers, texts, lists and tuples")


def _told(error: BaseException, path: str) -> str:
    """The exception in one line, with the last line of the file that it has passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
