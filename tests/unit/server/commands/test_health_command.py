"""`quire health`: finds where servers listen in /proc, and says what they answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest

from quire_server.commands import health

_TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 00000000:2328 00000000:0000 0A 00000000:00000000 00:00000000 00000000  2000        0 11 1 0 100 0 0 10 0\n"
    "   1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  2000        0 99 1 0 100 0 0 10 0\n"
    "   2: 0100007F:2328 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  2000        0 12 1 0 100 0 0 10 0\n"
)
_TCP6 = _TCP.splitlines()[0] + (
    "\n   0: 00000000000000000000000001000000:2329 00000000000000000000000000000000:0000 0A 00000000:00000000"
    " 00:00000000 00000000  2000        0 13 1 0 100 0 0 10 0\n"
)
_UNIX = (
    "Num       RefCount Protocol Flags    Type St Inode Path\n"
    "0000: 00000002 00000000 00010000 0001 01 14 /run/quire.sock\n"
    "0000: 00000003 00000000 00000000 0001 03 15 /run/quire.sock\n"
)


def _process(proc: Path, number: int, words: list[str], inodes: list[int]) -> None:
    folder = proc / str(number)
    (folder / "fd").mkdir(parents=True)
    (folder / "net").mkdir()
    (folder / "cmdline").write_text("\0".join(words) + "\0")
    (folder / "fd" / "0").symlink_to("/dev/null")
    for descriptor, inode in enumerate(inodes, 3):
        (folder / "fd" / str(descriptor)).symlink_to(f"socket:[{inode}]")
    for name, text in (("tcp", _TCP), ("tcp6", _TCP6), ("unix", _UNIX)):
        (folder / "net" / name).write_text(text)


def test_only_sockets_on_which_a_server_listens(tmp_path):
    _process(tmp_path, 1, ["/opt/quire/bin/python3", "/opt/quire/bin/quire", "serve", "--port", "9000"], [11, 12])
    _process(tmp_path, 7, ["nginx", "serve"], [99])
    (tmp_path / "net").mkdir()
    assert health.listening(tmp_path) == {"http://127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("inode", "address"), [(13, "http://[::1]:9001"), (14, "/run/quire.sock"), (15, None), (12, None)]
)
def test_each_kind_of_socket(inode, address, tmp_path):
    _process(tmp_path, 1, ["python", "-m", "quire_server.cli", "serve"], [inode])
    assert health.listening(tmp_path) == ({address} if address else set())


def test_nobody_listens_while_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(health, "listening", set)
    assert health.run([]) == 1
    assert capsys.readouterr().err == ("quire health: no server listens here\n")


def test_a_real_process_is_found():
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "quire", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        port = process.stdout.readline().strip()
        assert f"http://127.0.0.1:{port}" in health.listening()
        process.communicate("\n")


class _Answers(BaseHTTPRequestHandler):
    status, body = 200, b'{"status": "ready"}'

    def do_GET(self) -> None:
        assert self.path == "/health/ready"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"", "ready"),
        (503, b'{"error": {"message": "Not ready: draining."}}', "Not ready: draining."),
        (500, b"<html>", "answers 500"),
    ],
)
def test_what_it_says_and_returns(status, body, says, server, capsys):
    with patch.multiple(_Answers, status=status, body=body):
        assert health.run(["--url", server]) == (0 if status == 200 else 1)
    printed = capsys.readouterr()
    assert (printed.out if status == 200 else printed.err) == f"quire health: {server}: {says}\n"


def test_the_flag_that_is_gone(capsys):
    with pytest.raises(SystemExit, match="2"):
        health.run(["--node", "127.0.0.1:9", "--cluster-key-file", "key"])
    assert "--cluster-key-file: no flag any more, leave it out" in capsys.readouterr().err


class _UnixServer(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)

    def get_request(self):
        return self.socket.accept()[0], ("unix", 0)


def test_a_unix_socket(monkeypatch, capsys):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths are too long for a socket
        address = f"{folder}/a b:1.sock"
        with _UnixServer(address, _Answers) as server:
            thread = Thread(target=server.handle_request)
            thread.start()
            monkeypatch.setattr(health, "listening", lambda: {address})
            assert health.run([]) == 0
            thread.join()
    assert capsys.readouterr().out == f"quire health: {address}: ready\n"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "/nowhere/quire.sock"])
def test_who_does_not_answer(address, monkeypatch, capsys):
    monkeypatch.setattr(health, "listening", lambda: {address})
    assert health.run([]) == 1
    assert f"{address}: does not answer: " in capsys.readouterr().err
