"""Certificates for tests, made by the openssl command: one authority, one server, one client.

Promises: valid for 127.0.0.1 and localhost, for a day. Must not know: servers.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_EXTENSIONS = (
    "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\nkeyUsage=digitalSignature\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files in PEM."""

    authority: Path
    server: Path
    server_key: Path
    locked_key: Path  # the server's, encrypted with the password "sesame"
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "1", "-subj", "/CN=Test authority")
    (folder / "extensions").write_text(_EXTENSIONS)
    for name in ("server", "client"):
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", "extensions")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    openssl("pkey", "-in", "server.key", "-out", "locked.key", "-aes128", "-passout", "pass:sesame")
    return Certificates(
        authority=folder / "ca.pem",
        server=folder / "server.pem",
        server_key=folder / "server.key",
        locked_key=folder / "locked.key",
        client=folder / "client.pem",
        client_key=folder / "client.key",
    )
