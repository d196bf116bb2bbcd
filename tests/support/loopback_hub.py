"""A Hugging Face Hub on this machine, for as much as its library asks to download a repository.

Promises: serves folders as repositories with one commit, and counts requests; refuses others as the real one does.
Must not know: what is in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub:
    """Repositories by name; `gated` ones need the token "hf_good"."""

    def __init__(self, repositories: Mapping[str, Path], gated: frozenset[str] = frozenset()) -> None:
        self.repositories = dict(repositories)
        self.gated = gated
        self.requests: list[str] = []
        self.url = ""

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one GET; a HEAD leaves the body out."""
        words = unquote(urlsplit(path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            name, rest = "/".join(words[2:4]), words[4:]
        else:
            name, rest = "/".join(words[:2]), words[2:]
        folder = self.repositories.get(name)
        if folder is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
        if name in self.gated and token != "Bearer hf_good":
            return 403, {"X-Error-Code": "GatedRepo"}, b'{"error": "Access to this model is restricted"}'
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}'
        return _content(name, folder, rest)


def _content(name: str, folder: Path, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
    """A file, the list of files, or what the repository is."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if rest[:1] == ["resolve"]:
        file = folder.joinpath(*rest[2:])
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT}, file.read_bytes()
    names = [(path.relative_to(folder).as_posix(), path) for path in files]
    if rest[:1] == ["tree"]:
        entries = [
            {"type": "file", "path": path, "size": file.stat().st_size, "oid": _oid(file)} for path, file in names
        ]
        return 200, {}, json.dumps(entries).encode()
    siblings = [{"rfilename": path, "size": file.stat().st_size, "blobId": _oid(file)} for path, file in names]
    about = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "gated": False}
    return 200, {}, json.dumps({**about, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}).encode()


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(hub: LoopbackHub) -> Iterator[LoopbackHub]:
    """The hub on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path, self.headers.get("authorization", ""))
            self.send_response(status)
            for name, value in {**headers, "Content-Type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
