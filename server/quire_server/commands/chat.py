"""`quire chat`: a chat in the terminal with a server that runs already, over its OpenAI API.

Promises: starts no server; an answer appears as it is generated, Ctrl-C stops it and keeps what came, Ctrl-D ends the
chat; characters that control a terminal are not printed. Exit code 0, 1 where the server does not answer, 2 for flags
that cannot work. Must not know: the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire_engine.contract.errors import ConfigError
from quire_server.commands.health import connection, listening
from quire_server.settings.keys import sent_key
from quire_server.settings.sources import api_key_of_environment
from quire_server.showing.terminal import BAD_USAGE, DONE, FAILED, Parser, complain

DEFAULT_URL = "http://127.0.0.1:8000"
_NAME = "chat"
_TIMEOUT = 600.0  # seconds without a byte; a server that is busy with a prompt sends a comment now and then
_BLOCK = '"""'  # begins and ends a message of several lines
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\033[2m", "\033[0m"
_HELP = f"""\
/system TEXT  set the system prompt; without TEXT, remove it
/model NAME   talk to another model of the server; without NAME, list them
/new          begin a new conversation, with the same system prompt
/save FILE    write the conversation to a new file, as JSON
/help         this
/exit         end; Ctrl-D does too
A line that ends with \\ goes on in the next one, and {_BLOCK} begins and ends a message of several lines.
Ctrl-C stops an answer."""


class ChatError(Exception):
    """The server cannot answer; one line for the user."""


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The API of one server."""

    address: str  # a URL, or the path of a Unix socket
    key: str
    insecure: bool = False

    def models(self) -> list[str]:
        """The names that the server lists, the default one first. Raises ChatError."""
        link, reply = self._ask("GET", "/v1/models")
        with contextlib.closing(link):
            return [str(each["id"]) for each in json.loads(reply.read())["data"]]

    def answer(self, model: str, messages: Sequence[dict[str, str]]) -> Iterator[Piece]:
        """The pieces of an answer as they come. Raises ChatError."""
        link, reply = self._ask(
            "POST", "/v1/chat/completions", {"model": model, "messages": list(messages), "stream": True}
        )
        with contextlib.closing(link):
            try:
                yield from _pieces(reply)
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"the answer broke off: {error or type(error).__name__}") from None

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A reply with status 200, whose connection is the caller's to close. Raises ChatError."""
        link = connection(self.address, _TIMEOUT, None if self.insecure else ssl.create_default_context())
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        root = urlsplit(self.address).path.rstrip("/") if "://" in self.address else ""
        try:
            link.request(method, root + path, None if body is None else json.dumps(body), headers)
            reply = link.getresponse()
            if reply.status == http.client.OK:
                return link, reply
            refusal = reply.read()
        except ConnectionRefusedError:
            link.close()
            raise ChatError(f"nothing listens at {self.address}; start one: quire serve") from None
        except (OSError, http.client.HTTPException) as error:
            link.close()
            raise ChatError(f"{self.address} does not answer: {error or type(error).__name__}") from None
        link.close()
        raise ChatError(_refusal(reply.status, refusal))


def _refusal(status: int, body: bytes) -> str:
    """A server's error in its own words, with what to give this command where a key is missing."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = f"the server answers {status}"
    return said + (" Give --api-key KEY or QUIRE_API_KEY." if status == http.client.UNAUTHORIZED else "")


def _pieces(reply: http.client.HTTPResponse) -> Iterator[Piece]:
    """The pieces in a stream of server-sent events. Raises ChatError for one that ends with an error."""
    for line in reply:
        if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line.removeprefix(b"data:"))
        if "error" in event:
            raise ChatError(str(event["error"]["message"]))
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if thought := delta.get("reasoning"):
                yield Piece(thought, is_thought=True)
            if text := delta.get("content"):
                yield Piece(text)
            if choice.get("finish_reason") == "length":
                yield Piece("\n(The answer ends here: the limit of tokens is reached.)", is_thought=True)


@dataclass(slots=True, kw_only=True)
class Chat:
    """One conversation: what was said, and with whom."""

    server: Server
    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    in_color: bool = False  # thoughts are shown, dimmed

    def say(self, text: str) -> bool:
        """Send a message and print the answer; False where it failed, and the message is taken back."""
        self.messages.append({"role": "user", "content": text})
        said = ""
        try:
            for piece in self.server.answer(self.model, self._sent()):
                said += "" if piece.is_thought else piece.text
                self._show(piece)
        except ChatError as error:
            self.messages.pop()
            print("\n" * bool(said), end="", flush=True)
            complain(_NAME, _CONTROL.sub("", str(error)), FAILED)
            return False
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        print(flush=True)
        self.messages.append({"role": "assistant", "content": said})
        return True

    def obey(self, line: str) -> None:
        """Carry out a command such as `/system TEXT`."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        match command:
            case "/help" | "/?":
                print(_HELP)
            case "/system":
                self.system = rest
                print("The system prompt is set." if rest else "There is no system prompt now.")
            case "/new" | "/clear":
                self.messages.clear()
                print("A new conversation.")
            case "/model":
                self._choose(rest)
            case "/save":
                self._save(rest)
            case _:
                print(f"No command {command}; /help lists them.")

    def _sent(self) -> list[dict[str, str]]:
        """The messages of a request."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self.messages

    def _show(self, piece: Piece) -> None:
        text = _CONTROL.sub("", piece.text)
        if piece.is_thought:
            text = f"{_DIM}{text}{_PLAIN}" if self.in_color else ""
        print(text, end="", flush=True)

    def _choose(self, name: str) -> None:
        try:
            names = self.server.models()
        except ChatError as error:
            complain(_NAME, str(error), FAILED)
            return
        if name in names:
            self.model = name
        print("\n".join(f"{'*' if each == self.model else ' '} {each}" for each in names))
        if name and name not in names:
            print(f"There is no model {name}.")

    def _save(self, name: str) -> None:
        if not name:
            print("Name a file: /save chat.json")
            return
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump({"model": self.model, "messages": self._sent()}, file, indent=2, ensure_ascii=False)
                file.write("\n")
        except (OSError, RuntimeError) as error:
            print(f"Not saved: {error}")
            return
        print(f"Saved: {name}")


def run(argv: Sequence[str]) -> int:
    """Chat until the input ends; the process's exit code."""
    given = build_parser().parse_args(argv)
    addresses = [_address(given.url)] if given.url else sorted(listening()) or [DEFAULT_URL]
    if len(addresses) > 1:
        return complain(_NAME, f"several servers run here: {', '.join(addresses)}; name one with --url", BAD_USAGE)
    try:
        key = sent_key(given.api_key or api_key_of_environment(), "--api-key")
    except ConfigError as error:
        return complain(_NAME, str(error), BAD_USAGE)
    server = Server(address=addresses[0], key=key, insecure=given.insecure)
    try:
        model = given.model or server.models()[0]
    except ChatError as error:
        return complain(_NAME, str(error), FAILED)
    chat = Chat(server=server, model=model, system=given.system, in_color=sys.stdout.isatty())
    if given.message:
        return DONE if chat.say(" ".join(given.message)) else FAILED
    return _converse(chat)


def _address(url: str) -> str:
    """The server's own address, of one as clients are given it: with /v1 at its end, or without a scheme."""
    if "://" not in url and not url.startswith("/"):
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def _converse(chat: Chat) -> int:
    """Read messages and commands until the input ends; where nobody types, the exit code tells of a failure."""
    has_terminal = sys.stdin.isatty()
    if has_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415  # which edits the line, and brings back earlier ones
        print(f"{chat.model} at {chat.server.address}. /help lists commands, Ctrl-D ends.")
    all_well = True
    while True:
        try:
            text = _read_message(">>> " if has_terminal else "", "... " if has_terminal else "")
        except EOFError:
            print(end="\n" * has_terminal)
            return DONE if all_well or has_terminal else FAILED
        except KeyboardInterrupt:
            if not has_terminal:
                raise
            print("\nCtrl-D or /exit ends the chat.")
            continue
        if text in {"/exit", "/quit", "/bye"}:
            return DONE
        if text.startswith("/"):
            chat.obey(text)
        elif text:
            all_well &= chat.say(text)


def _read_message(first: str, further: str) -> str:
    """A message of one or several lines. Raises EOFError."""
    line = input(first)
    lines = []
    if line.lstrip().startswith(_BLOCK):
        line = line.lstrip().removeprefix(_BLOCK)
        while not line.rstrip().endswith(_BLOCK):
            lines.append(line)
            line = input(further)
        return "\n".join([*lines, line.rstrip().removesuffix(_BLOCK)]).strip()
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        line = input(further)
    return "\n".join([*lines, line]).strip()


def build_parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    parser = Parser(
        prog="quire chat",
        description="Chat with a server that runs already: as it is typed, or one MESSAGE and its answer.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("message", metavar="MESSAGE", nargs="*", help="ask this, print the answer and end")
    parser.add_argument("--url", help=f"of the server; default: the one that runs here, else {DEFAULT_URL}")
    parser.add_argument("--model", metavar="NAME", help="of several that the server lists; default: the first")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--api-key", default="", metavar="KEY", help="where the server has keys; or QUIRE_API_KEY")
    parser.add_argument("--insecure", action="store_true", help="take any certificate of an HTTPS server")
    return parser
