"""The names that users build on, as they are and as each version has promised them.

`python -m support.stable_names`, with tests/ in PYTHONPATH, records those of the present version; with `--check` it
says whether the record has all of them, as a release asks.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from quire_server import errors
from quire_server.app import ROUTERS
from quire_server.commands.completion import whole_parser
from quire_server.metrics.metrics import Metrics
from quire_server.settings import Settings, flag_name, plain_fields
from support.fakes import connect, make_app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "stable_names"
Names = dict[str, list[str]]

KINDS = {
    "commands": "a command of `quire`",
    "flags": "a flag, with its command",
    "settings": "a setting: flag, variable and key of the file",
    "metrics": "a metric with its type",
    "routes": "a route",
    "fields": "a field of a request or reply of a route",
    "error_codes": "the code of an error",
}


def version() -> str:
    """The package's version, as pyproject.toml has it."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def era(number: str) -> tuple[str, ...]:
    """The part of a version that must change before a name may go: before 1.0 the second number is part of it."""
    major, minor, *_ = number.split(".")
    return (major, minor) if major == "0" else (major,)


def present() -> Names:
    """The names as they are, each list sorted."""
    commands = _commands()
    found = {
        "commands": set(commands),
        "flags": {f"{command} {flag}" for command, flags in commands.items() for flag in flags},
        "settings": {flag_name(name) for name in plain_fields(Settings)},
        "metrics": _metrics(),
        "routes": _routes(),
        "fields": asyncio.run(_fields()),
        "error_codes": _codes(),
    }
    return {kind: sorted(names) for kind, names in found.items()}


def _commands() -> dict[str, list[str]]:
    """The flags of each command that its help shows."""
    (subparsers,) = (action for action in whole_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: [flag for action in parser._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        for name, parser in subparsers.choices.items()
    }


def _metrics() -> set[str]:
    families = text_string_to_metric_families(Metrics("tiny").render().decode())
    return {f"{each.name}{'_total' if each.type == 'counter' else ''} ({each.type})" for each in families}


def _routes() -> set[str]:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    return {f"{method} {route.path}" for route in routes for method in route.methods - {"HEAD"}}


async def _fields() -> set[str]:
    """The top fields of each route's body and replies: `POST /v1/completions takes temperature`, `... gives usage`."""
    async with connect(make_app()) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
    found = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = {"takes": [operation.get("requestBody", {})], "gives": [*operation.get("responses", {}).values()]}
            for verb, each in bodies.items():
                schemas = [media.get("schema", {}) for body in each for media in body.get("content", {}).values()]
                names = {name for schema in schemas for name in _properties(schema, document)}
                found |= {f"{method.upper()} {path} {verb} {name}" for name in names}
    return found


def _properties(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    """The names of an object's fields, over references and alternatives."""
    if "$ref" in schema:
        return _properties(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]], document)
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    return {*schema.get("properties", ())}.union(*(_properties(part, document) for part in parts))


def _codes() -> set[str]:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ApiError)]
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "server").rglob("*.py"))
    return {kind.default_code for kind in classes} | set(re.findall(r'\bcode="([a-z_]+)"', text))


def recorded(folder: Path = FOLDER) -> dict[str, Names]:
    """The names that each version has promised."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def broken(promised: dict[str, Names], now: Names, number: str) -> list[str]:
    """A sentence for each promised name of this era that is gone, with what to do."""
    sentences = {}
    for promise, names in promised.items():
        for kind in KINDS if era(promise) == era(number) else ():
            for name in sorted({*names[kind]} - {*now[kind]}):
                sentences[kind, name] = (
                    f"{name} ({KINDS[kind]}) was promised by {promise} and is gone. Keep it under its name, if need be"
                    f" beside a new one that does the same. If it must go, that is a version which no longer begins"
                    f" with {'.'.join(era(number))}: raise it in pyproject.toml, say in CHANGELOG.md under Removed what"
                    " takes its place, and record the new version with `python -m support.stable_names`. A name that no"
                    f" release has had yet may be taken out of tests/data/stable_names/{promise}.json instead."
                )
    return list(sentences.values())


def missing(promised: Names, now: Names) -> list[str]:
    """The names that are there and that a record lacks."""
    return [f"{name} ({KINDS[kind]})" for kind in KINDS for name in sorted({*now[kind]} - {*promised.get(kind, ())})]


def main(words: Sequence[str]) -> int:
    """Record the present version's names, or look whether they are; the exit code."""
    number, now = version(), present()
    if words == ["--check"]:
        lacking = missing(recorded().get(number, {}), now)
        for name in lacking:
            print(f"{name} is not in the record of {number}", file=sys.stderr)
        if lacking:
            print("`python -m support.stable_names`, with tests/ in PYTHONPATH, records them", file=sys.stderr)
        return 1 if lacking else 0
    (FOLDER / f"{number}.json").write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
