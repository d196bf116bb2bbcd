"""The signatures of published attention functions, as data: how tests know what the libraries really take.

`python tests/support/flash_signatures.py SOURCE... > tests/kernels/data/flash_signatures.json`, where a source is an
sdist, a wheel, or a folder with one unpacked, called NAME-VERSION as they are. Reads the functions by `ast`: nothing is
imported, built or downloaded. Must not know: the adapters.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "kernels" / "data" / "flash_signatures.json"
# The files of a distribution, and the functions in them that an adapter calls.
FUNCTIONS = {
    ("flash-attn", "flash_attn/flash_attn_interface.py"): ("flash_attn_varlen_func", "flash_attn_with_kvcache"),
    ("flash-attn", "hopper/flash_attn_interface.py"): ("flash_attn_with_kvcache",),
    ("fa3-fwd", "fa3_fwd_interface.py"): ("flash_attn_varlen_func",),
    ("torch", "torch/nn/attention/varlen.py"): ("varlen_attn",),
}
_NAME = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)-(\d[\w.]*?)(?:[-+].*)?(?:\.tar\.gz|\.whl)?")


def read(source: Path) -> list[dict[str, Any]]:
    """An entry for each function that is in the source. ValueError if there is none."""
    match = _NAME.fullmatch(source.name)
    if match is None:
        raise ValueError(f"{source.name} does not begin with NAME-VERSION")
    package, version = match[1].replace("_", "-"), match[2].rstrip(".")
    found = []
    for path, content in _files(source):
        for name in FUNCTIONS.get((package, path), ()):
            found.append(
                {
                    "package": package,
                    "version": version,
                    "file": path,
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "function": name,
                    "parameters": _parameters(content, name),
                }
            )
    if not found:
        raise ValueError(f"{source} has none of the functions")
    return found


def _files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Paths in the distribution, with their contents, of the files that matter."""
    wanted = {path for _, path in FUNCTIONS}
    if source.is_dir():
        for path in sorted(wanted):
            if (source / path).is_file():
                yield path, (source / path).read_bytes()
    elif source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            for path in sorted(wanted & set(wheel.namelist())):
                yield path, wheel.read(path)
    else:
        with tarfile.open(source) as sdist:
            for member in sdist:
                path = member.name.partition("/")[2]
                file = sdist.extractfile(member) if path in wanted else None
                if file is not None:
                    yield path, file.read()


def _parameters(content: bytes, name: str) -> list[dict[str, str]]:
    functions = [node for node in ast.parse(content).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(functions) != 1:
        raise ValueError(f"there are {len(functions)} functions {name}")
    arguments = functions[0].args
    if arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        raise ValueError(f"{name} takes more than what has a name")
    plain, only = arguments.args, arguments.kwonlyargs
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    kinds = ["POSITIONAL_OR_KEYWORD"] * len(plain) + ["KEYWORD_ONLY"] * len(only)
    return [
        {"name": each.arg, "kind": kind} | ({} if default is None else {"default": ast.unparse(default)})
        for each, kind, default in zip([*plain, *only], kinds, defaults, strict=True)
    ]


def recorded() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(DATA.read_text("utf-8"))
    return entries


def entry(package: str, version: str, file: str, function: str) -> dict[str, Any]:
    """The recorded entry of that function."""
    wanted = {"package": package, "version": version, "file": file, "function": function}
    (found,) = (each for each in recorded() if wanted.items() <= each.items())
    return found


def signature(entry: dict[str, Any]) -> inspect.Signature:
    """Of a recorded entry. Defaults are literals."""
    return inspect.Signature(
        [
            inspect.Parameter(
                each["name"],
                getattr(inspect.Parameter, each["kind"]),
                default=ast.literal_eval(each["default"]) if "default" in each else inspect.Parameter.empty,
            )
            for each in entry["parameters"]
        ]
    )


if __name__ == "__main__":
    entries = [each for source in sys.argv[1:] for each in read(Path(source))]
    print("[", ",\n".join(json.dumps(each) for each in entries), "]", sep="\n")
