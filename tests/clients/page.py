"""What docs/clients.md tells people to enter, by client, with a test server's address and key in place of its own."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import yaml

from clients.conftest import KEY
from e2e.served import Served
from support.documents import section

SHOWN_URL, SHOWN_KEY = "http://127.0.0.1:8000", "none"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(client: str) -> list[tuple[str, str]]:
    """The language and the text of each block of a client's section."""
    return _BLOCK.findall(section("docs/clients.md", client))


def script(client: str, server: Served) -> tuple[str, str]:
    """The script of a client's section, for a server, and what the page shows as its output."""
    (kind, code), (_, shown) = blocks(client)
    assert kind == "python"
    return _for(code, server), shown


def configuration(client: str, server: Served) -> Any:
    """The configuration file of a client's section, parsed, for a server."""
    ((kind, text),) = blocks(client)
    return {"json": json.loads, "yaml": yaml.safe_load}[kind](_for(text, server))


def commands(client: str, server: Served) -> tuple[dict[str, str], list[str]]:
    """The variables that a section's commands export, or give to a container, and the words of the last command."""
    ((kind, text),) = blocks(client)
    assert kind == "sh"
    lines = [shlex.split(line) for line in _for(text, server).replace("\\\n", " ").splitlines()]
    words = [word for line in lines for word in line if re.match(r"[A-Z_]+=", word)]
    variables = dict(word.split("=", 1) for word in words)
    return variables, lines[-1]


def fields(client: str, server: Served) -> dict[str, str]:
    """The values of a section's table, by the labels of their input fields."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`]*)` \|$", section("docs/clients.md", client), re.MULTILINE)
    return {label: _for(value, server) for label, value in rows}


def _for(text: str, server: Served) -> str:
    """The text with a server's address and key; the key is a word of its own, in quotes or after `=` or `: `."""
    key = re.compile(rf'((?:"|=|: )|^){SHOWN_KEY}(?="|\s|$)', re.MULTILINE)
    return key.sub(rf"\g<1>{KEY}", text.replace(SHOWN_URL, server.url))
