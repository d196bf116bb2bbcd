"""The chat template process: renders one Hugging Face chat template in a sandbox; one JSON line in, one line out.

Promises: it dies when a line takes too long or too much memory, or when its parent is gone. `prompt` starts it by file
name.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from quire_server.text import spelled_json


class _Raised(jinja2.TemplateError):
    """The template itself refused its input, through `raise_exception`."""


class _TooLong(Exception):
    """The rendered text is longer than the limit."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment of chat templates: the same options, globals and filters as in transformers."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which models were not trained on."""
    return spelled_json.write(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compile_source(source: str) -> tuple[jinja2.Template, list[str], list[str]]:
    """The template, the names it reads that the environment does not define, and the fields and strings it names."""
    env = environment()
    tree = env.parse(source)
    words = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    words |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    names = jinja2.meta.find_undeclared_variables(tree) - env.globals.keys()  # last: it folds lists into constants
    return env.from_string(source), sorted(names), sorted(words)


def render(template: jinja2.Template, variables: Mapping[str, object], max_chars: int) -> str:
    """Render the template; stops as soon as the text is longer than `max_chars`."""
    pieces: list[str] = []
    total = 0
    for piece in template.generate(variables):
        total += len(piece)
        if total > max_chars:
            raise _TooLong
        pieces.append(piece)
    return "".join(pieces)


def _failure(exc: Exception) -> dict[str, object]:
    """A short text without values: it quotes only jinja2's own errors and the template's own messages."""
    if isinstance(exc, _TooLong):
        return {"error": "too_long"}
    if isinstance(exc, _Raised):
        return {"error": "raised", "message": str(exc)[:500]}
    if isinstance(exc, jinja2.TemplateSyntaxError):
        return {"error": "failed", "message": f"line {exc.lineno}: {exc.message}"[:500]}
    if isinstance(exc, jinja2.TemplateError):
        return {"error": "failed", "message": f"{type(exc).__name__}: {exc.message}"[:500]}
    return {"error": "failed", "message": type(exc).__name__}


def _limit(memory_bytes: int) -> None:
    """The kernel enforces both limits: no code of a template can catch or outlive them."""
    with contextlib.suppress(ValueError, OSError):  # not every system can bound address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # handlers and masks are inherited from the parent
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def main(seconds: float, memory_bytes: int) -> None:
    """The first line has the template's source, every further line the variables of a render."""
    _limit(memory_bytes)
    template: jinja2.Template | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply: dict[str, object]
        try:
            request = cast(dict[str, Any], spelled_json.read(line))
            if template is None:
                template, names, words = compile_source(request["source"])
                reply = {"variables": names, "words": words}
            else:
                reply = {"text": render(template, request["variables"], request["max_chars"])}
        except Exception as exc:  # MemoryError included: the render's memory is free by now
            reply = _failure(exc)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
