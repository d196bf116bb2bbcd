"""The configurations of nginx and Caddy in docs/access.md: read by their syntax, and by the programs where they are.

Neither program is needed: without it only its own check is skipped, and what the text says of streams and paths is
still held.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quire_server.flags import option_default
from quire_server.settings import Settings
from support.documents import section

PAGE, TITLE = "docs/access.md", "Behind nginx or Caddy"
LONGEST_DEFAULT_BODY = 8  # MiB, docs/settings.md


def block(kind: str) -> str:
    """The one block of a language in the section."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", section(PAGE, TITLE), re.DOTALL | re.MULTILINE)
    return found


def directives(text: str) -> list[list[str]]:
    """nginx's directives as words, with the line that opens a block as one; every other one ends with a semicolon."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        one_line = re.fullmatch(r"([^{};]+)\{ ([^{};]+); \}", line)
        if one_line is not None:
            found += [one_line[1].split(), one_line[2].split()]
            continue
        assert line == "}" or line.endswith((" {", ";")), line
        found.append(line.rstrip("{;").split())
    assert text.count("{") == text.count("}")
    return found


def test_nginx_passes_streams_on_at_once() -> None:
    said = directives(block("nginx"))
    port = option_default(Settings.model_fields["port"])
    assert ["proxy_pass", f"http://127.0.0.1:{port}"] in said
    assert ["proxy_buffering", "off"] in said
    assert ["proxy_http_version", "1.1"] in said
    assert ["proxy_set_header", "Host", "$host"] in said
    assert ["proxy_set_header", "X-Forwarded-For", "$proxy_add_x_forwarded_for"] in said, "or all clients are local"
    (size,) = (words[1] for words in said if words[0] == "client_max_body_size")
    assert int(size.removesuffix("m")) >= LONGEST_DEFAULT_BODY


def test_caddy_ends_a_request_with_its_client() -> None:
    said = [line.split() for line in block("caddy").splitlines()]
    port = option_default(Settings.model_fields["port"])
    assert ["reverse_proxy", f"127.0.0.1:{port}"] in said
    assert "flush_interval" not in block("caddy")


def test_both_hide_the_metrics() -> None:
    assert ["location", "=", "/metrics"] in directives(block("nginx"))
    assert ["respond", "/metrics", "404"] in [line.split() for line in block("caddy").splitlines()]


@pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx on this machine")
def test_nginx_takes_it(tmp_path: Path) -> None:
    certificates = re.compile(r"^ *ssl_certificate.*\n", re.MULTILINE)
    server = certificates.sub("", block("nginx")).replace("443 ssl", "127.0.0.1:18443")
    file = tmp_path / "nginx.conf"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {tmp_path / kind};" for kind in kinds)
    file.write_text(f"pid {tmp_path / 'pid'};\nevents {{}}\nhttp {{ {folders} access_log off;\n{server}}}\n")
    done = subprocess.run(
        ["nginx", "-t", "-e", str(tmp_path / "errors"), "-c", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("caddy") is None, reason="no caddy on this machine")
def test_caddy_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "Caddyfile"
    file.write_text(block("caddy"))
    done = subprocess.run(
        ["caddy", "adapt", "--adapter", "caddyfile", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
