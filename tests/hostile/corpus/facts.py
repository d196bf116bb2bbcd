"""What cases are made from: the server's own document, its sizes, its key; and how a JSON request is written.

Promises: JSON can hold what no JSON library writes. Must not know: which cases there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hostile.case import OK_OR_REFUSED, Answer, Case, Parts, request

MARK = "quokka 7391"  # in every prompt, so that errors can be searched for it
KEY = "sk-hostile-0123456789"
LARGE = 1 << 15  # a body of more bytes may also be refused for its size alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """About the server that the cases are for."""

    document: dict[str, Any]  # OpenAPI
    model: str
    vocab_size: int
    special_tokens: tuple[str, ...]
    max_model_len: int
    max_body_bytes: int
    header_timeout: float
    trap: int = 9  # a port of this machine that the server must not call
    key: str = KEY
    thorough: bool = False  # every value in every field, not some of them in each

    @property
    def authorization(self) -> str:
        return f"Authorization: Bearer {self.key}"

    def post(self, path: str, body: object, *headers: str) -> Callable[[], Parts]:
        """The parts of a POST with the key; `body` is made into JSON when it is sent, bytes are sent as they are."""

        def parts() -> Parts:
            raw = body if isinstance(body, bytes) else dumps(body).encode("utf-8", "surrogatepass")
            yield request("POST", path, raw, headers=[self.authorization, *headers])

        return parts

    def case(
        self,
        kind: str,
        name: str,
        path: str,
        body: object,
        expected: Iterable[int] = OK_OR_REFUSED,
        *,
        check: Callable[[Answer], str | None] | None = None,
        quotes: tuple[str, ...] = (),
        patience: float = 30.0,
        slow: bool = False,
    ) -> Case:
        """A JSON request with the key."""
        return Case(
            kind=kind,
            name=f"{path} {name}",
            path=path,
            parts=self.post(path, body),
            expected=frozenset(expected),
            secrets=(self.key, MARK),
            check=check,
            quotes=quotes,
            patience=patience,
            slow=slow,
        )

    def completion(
        self, kind: str, name: str, changes: dict[str, object], expected: Iterable[int], **more: Any
    ) -> Case:
        body = {"model": self.model, "prompt": MARK, "max_tokens": 4, **changes}
        return self.case(kind, name, "/v1/completions", body, expected, **more)

    def chat(self, kind: str, name: str, changes: dict[str, object], expected: Iterable[int], **more: Any) -> Case:
        messages = [{"role": "user", "content": MARK}]
        body = {"model": self.model, "messages": messages, "max_tokens": 4, **changes}
        return self.case(kind, name, "/v1/chat/completions", body, expected, **more)


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON's text as it is to be sent, right or wrong. `what` names it where the text is long."""

    text: str
    what: str = ""

    def __str__(self) -> str:
        return self.what or self.text


def dumps(value: object) -> str:
    """JSON, with what is `Raw` as it is."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{dumps(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def holds_raw(value: object) -> bool:
    """Whether any part of it is not JSON that a library would write."""
    if isinstance(value, dict):
        return any(map(holds_raw, value.values()))
    return isinstance(value, Raw) or (isinstance(value, list) and any(map(holds_raw, value)))


def shown(value: object) -> str:
    """A value in a case's name."""
    text = str(value) if isinstance(value, Raw) else repr(value)
    return text if len(text) <= 40 else f"{text[:24]}… ({len(text)} characters)"
