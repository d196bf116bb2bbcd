"""The process that a student's file runs in: `python -P host.py FILE SECONDS BYTES`, with calls as lines of JSON.

Promises: the file sees nothing of the judge, which is another process; what it prints goes to stderr; an exception is a
reply with its last line in the file. It is the one place that runs a file, and only one that its user names.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

NAMES = ("BlockPool", "Scheduler")


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
    """`classes`: those that the file defines; `make` an object; `call` a method; `read` an attribute."""
    match call["do"]:
        case "classes":
            return [name for name in NAMES if isinstance(getattr(module, name, None), type)]
        case "make":
            objects[call["of"]] = getattr(module, call["name"])(*call["args"], **call["kwargs"])
            return None
        case "read":
            found = getattr(objects[call["of"]], call["name"])
            return found() if callable(found) else found
    method: Callable[..., object] = getattr(objects[call["of"]], call["name"])
    return method(*call["args"], **call["kwargs"])


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
