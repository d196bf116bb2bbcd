"""Bodies that are no JSON, or more of it than anybody needs: encodings, depth, numbers, keys, and what time they take.

Promises: what is too deep, too large or too many is refused like what is wrong. Must not know: what fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from hostile.case import Case, Parts
from hostile.corpus.facts import Facts

REFUSED = frozenset({400})
TOO_MUCH = frozenset({400, 413})


def cases(facts: Facts) -> Iterator[Case]:
    for path in ("/tokenize", "/v1/chat/completions", "/v1/messages"):
        for name, raw in _wrong().items():
            yield _body(facts, path, name, lambda raw=raw: raw, REFUSED)  # type: ignore[misc]
    yield from _large(facts)
    yield from _without_a_key(facts)


def _body(facts: Facts, path: str, name: str, raw: Callable[[], bytes], expected: frozenset[int]) -> Case:
    def parts() -> Parts:
        yield from facts.post(path, raw())()

    return Case(kind="JSON", name=f"{path} {name}", path=path, parts=parts, expected=expected, secrets=(facts.key,))


def _wrong() -> dict[str, bytes]:
    text = '{"prompt":"a"}'
    return {
        "in UTF-16": text.encode("utf-16"),
        "in UTF-16 without a mark": text.encode("utf-16-le"),
        "in UTF-32": text.encode("utf-32"),
        "with two byte order marks": b"\xef\xbb\xbf" + text.encode("utf-8-sig"),
        "NULs": bytes(100),
        "a NUL at its end": text.encode() + b"\0",
        "not UTF-8": b'{"prompt":"\xff"}',
        "an overlong slash": b'{"prompt":"\xc0\xaf"}',
        "a surrogate in UTF-8": b'{"prompt":"\xed\xa0\x80"}',
        "half a character": b'{"prompt":"\xf0\x9f"}',
        "a lone surrogate": b'{"prompt":"\\ud800"}',
        "surrogates the wrong way round": b'{"prompt":"\\udc00\\ud800"}',
        "a surrogate in a key": b'{"\\ud800":1}',
        "empty": b"",
        "white space": b" \n\t\r",
        "null": b"null",
        "a list": b"[]",
        "a text": b'"a"',
        "a number": b"1",
        "true": b"true",
        "NaN": b"NaN",
        "cut off": b'{"prompt":"a',
        "cut off in an escape": b'{"prompt":"a\\u00',
        "one brace too many": text.encode() + b"}",
        "two objects": (text * 2).encode(),
        "a comment": b'{"prompt":"a"/**/}',
        "single quotes": b"{'prompt':'a'}",
        "no quotes": b"{prompt:1}",
        "a comma at its end": b'{"prompt":"a",}',
        "a control character": b'{"prompt":"\x01"}',
        "a bad escape": b'{"prompt":"\\x41"}',
        "a leading zero": b'{"prompt":01}',
        "a plus": b'{"prompt":+1}',
        "a point without digits": b'{"prompt":1.}',
        "hexadecimal": b'{"prompt":0x1}',
        "5,000 digits": b'{"prompt":' + b"1" * 5000 + b"}",
        "5,000 digits behind the point": b'{"prompt":0.' + b"1" * 5000 + b"}",
        "an exponent of 5,000 digits": b'{"prompt":1e' + b"1" * 5000 + b"}",
        "65 arrays in each other": b'{"prompt":' + b"[" * 65 + b"]" * 65 + b"}",
        "1,000 objects in each other": b'{"a":' * 1000 + b"1" + b"}" * 1000,
        "20,000 arrays that are not closed": b'{"prompt":' + b"[" * 20_000,
        "the same key 5,000 times": b"{" + b'"a":1,' * 5000 + b'"a":1}',
        "a key of 20 KB": b'{"' + b"a" * 20_000 + b'":1}',
        "keys that differ in case": b'{"Prompt":"a"}',
    }


def _large(facts: Facts) -> Iterator[Case]:
    """As much as a body may hold, of what takes the most time to look at."""
    size = facts.max_body_bytes - 64
    kinds: dict[str, tuple[str, Callable[[], bytes]]] = {
        "brackets": ("/tokenize", lambda: b"[" * size),
        "pairs of brackets": ("/tokenize", lambda: b'{"prompt":[' + b"[]," * (size // 3 - 8) + b"[]]}"),
        "nested groups": (
            "/tokenize",
            lambda: b'{"a":' + b"[" * 60 + b"[[]]," * (size // 5 - 40) + b"[]" + b"]" * 60 + b"}",
        ),
        "quotes": ("/tokenize", lambda: b'"' * size),
        "backslashes": ("/tokenize", lambda: b'{"prompt":"' + b"\\" * (size - 16)),
        "escapes": ("/tokenize", lambda: b'{"prompt":"' + b"\\u0041" * (size // 6 - 4) + b'"}'),
        "white space": ("/tokenize", lambda: b'{"prompt":"a"' + b" " * (size - 20) + b"}"),
        "keys": ("/tokenize", lambda: b"{" + b",".join(b'"%07x":1' % i for i in range(size // 13)) + b"}"),
        "keys of an unknown field": (
            "/v1/completions",
            lambda: b'{"prompt":"a","x":{' + b",".join(b'"%07x":1' % i for i in range(size // 13 - 4)) + b"}}",
        ),
        "digits": ("/tokenize", lambda: b'{"prompt":' + b"1" * (size - 16) + b"}"),
        "numbers": ("/detokenize", lambda: b'{"tokens":[' + b"1," * (size // 2 - 16) + b"1]}"),
        "long numbers": ("/detokenize", lambda: b'{"tokens":[' + b"1111111111111111111," * (size // 20 - 4) + b"1]}"),
        "fractions": ("/detokenize", lambda: b'{"tokens":[' + b"1.5," * (size // 4 - 8) + b"1]}"),
        "prompts": ("/v1/completions", lambda: b'{"prompt":[' + b'"a",' * (size // 4 - 8) + b'"a"]}'),
        "token ids": ("/v1/completions", lambda: b'{"prompt":[' + b"1," * (size // 2 - 16) + b"1]}"),
        "a prompt": ("/v1/completions", lambda: b'{"prompt":"' + b"word " * (size // 5 - 8) + b'"}'),
        "a prompt of one letter": ("/v1/completions", lambda: b'{"prompt":"' + b"a" * (size - 16) + b'"}'),
        "a prompt without spaces": ("/tokenize", lambda: b'{"prompt":"' + b"ab1-" * (size // 4 - 8) + b'"}'),
        "combining marks": (
            "/tokenize",
            lambda: json.dumps({"prompt": "a" + "\u0301" * (size // 2 - 16)}, ensure_ascii=False).encode(),
        ),
        "messages": (
            "/v1/chat/completions",
            lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * min(4096, size // 32)) + b"]}",
        ),
        "parts": (
            "/v1/chat/completions",
            lambda: (
                b'{"messages":[{"role":"user","content":['
                + b",".join([b'{"type":"text","text":"a"}'] * (size // 28 - 4))
                + b"]}]}"
            ),
        ),
        "biased tokens": (
            "/v1/completions",
            lambda: b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(size // 12)) + b"}}",
        ),
        "texts to compare": ("/v1/score", lambda: b'{"text_1":"a","text_2":[' + b'"a",' * (size // 4 - 16) + b'"a"]}'),
        "tools": (
            "/v1/messages",
            lambda: (
                b'{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"tools":['
                + b",".join([b'{"name":"f","input_schema":{"type":"object"}}'] * (size // 48 - 8))
                + b"]}"
            ),
        ),
        "items": (
            "/v1/responses",
            lambda: b'{"input":[' + b",".join([b'{"role":"user","content":"a"}'] * (size // 32 - 8)) + b"]}",
        ),
    }
    for name, (path, raw) in kinds.items():
        expected = TOO_MUCH | {200} if name in {"white space", "escapes", "a prompt without spaces"} else TOO_MUCH
        if path in {"/tokenize", "/detokenize"} and name not in {"brackets", "quotes", "digits", "backslashes"}:
            expected = TOO_MUCH | {200}
        yield Case(
            kind="large bodies",
            name=f"{path} {size} bytes of {name}",
            path=path,
            parts=_sent(facts, path, raw),
            expected=frozenset(expected),
            patience=60.0,
        )


def _sent(facts: Facts, path: str, raw: Callable[[], bytes]) -> Callable[[], Parts]:
    def parts() -> Parts:
        yield from facts.post(path, raw())()

    return parts


def _without_a_key(facts: Facts) -> Iterator[Case]:
    """Whoever has no key is told so before anybody looks at what he brings."""
    size = facts.max_body_bytes - 64
    for name, byte in (("brackets", b"["), ("quotes", b'"'), ("braces", b"{")):

        def parts(byte: bytes = byte) -> Parts:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            yield f"{head}Content-Length: {size}\r\nConnection: close\r\n\r\n".encode()
            yield byte * size

        yield Case(
            kind="large bodies",
            name=f"{size} bytes of {name} without a key",
            path="/v1/completions",
            parts=parts,
            expected=frozenset({401}),
        )
