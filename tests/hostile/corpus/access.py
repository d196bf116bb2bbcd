"""Ways to what needs a key, without one: routes by methods, spellings of paths, names of hosts, keys that are none.

Promises: without the key nothing of a model is told, whatever the request looks like. Must not know: which paths are
public, but for the list that the documentation has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hostile.case import Answer, Case, request
from hostile.corpus.facts import MARK, Facts

PUBLIC = {
    *("/health", "/health/live", "/health/ready", "/ping", "/load"),
    *("/version", "/metrics", "/", "/docs", "/dashboard", "/learn"),
}
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
NO_ENTRY = frozenset({400, 401, 403, 404, 405})
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def cases(facts: Facts) -> Iterator[Case]:
    yield from _routes(facts)
    yield from _targets(facts)
    yield from _hosts(facts)
    yield from _methods(facts)
    yield from _keys(facts)
    yield from _ids(facts)


def _one(kind: str, name: str, raw: bytes, expected: frozenset[int] | set[int], **more: object) -> Case:
    return Case(
        kind=kind,
        name=name,
        path=raw.split(b" ", 2)[1].decode("latin-1") if raw.count(b" ") > 1 else "/",
        parts=lambda: (raw,),
        expected=frozenset(expected),
        secrets=(MARK,),
        **more,  # type: ignore[arg-type]
    )


def _tells_nothing(facts: Facts) -> object:
    def check(answer: Answer) -> str | None:
        if answer.status == 200 and facts.model.encode() in answer.body and b"max_model_len" in answer.body:
            return "the models are told without a key"
        return None

    return check


def _routes(facts: Facts) -> Iterator[Case]:
    """Every route by every method, without a key, and with a wrong one."""
    for path in [
        *facts.document["paths"],
        "/openapi.json",
        "/dashboard/events",
        "/learn/events",
        "/nothing",
        "/admin",
        "/debug",
    ]:
        concrete = re.sub(r"\{\w+(?::\w+)?\}", "a", path)
        for method in METHODS:
            body = b"{}" if method in {"POST", "PUT", "PATCH"} else None
            allowed = {200, 405} if path in PUBLIC else {401, 403, 405 if method == "TRACE" else 401}
            yield _one("no key", f"{method} {path}", request(method, concrete, body), allowed)
        wrong = request("GET", concrete, headers=["Authorization: Bearer wrong"])
        yield _one("no key", f"GET {path} with a wrong key", wrong, {200, 405} if path in PUBLIC else {401, 403})


def _targets(facts: Facts) -> Iterator[Case]:
    check = _tells_nothing(facts)
    for target in (
        *("//v1/models", "///v1/models", "/V1/models", "/v1%2fmodels", "/v1%2Fmodels", "/v1/models/", "/v1//models"),
        *("/./v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/health%2f..%2fv1/models"),
        *("/health;/v1/models", "/health?/../v1/models", "/health#/../v1/models", "/health%23/../v1/models"),
        *("/health%00/../v1/models", "/v1/models%00", "/v1/models%20", "/v1/models%0a", "/v1/models;a=b"),
        *("/v1/models?key=a", "/v1/models?api_key=wrong", "/v1/models#a", "/%76%31/models", "/v1/%6dodels"),
        *("/%2576%2531/models", "/v1/models%c0%af", "/v1/models%zz", "/v1/models%", "/v1/models%u002f"),
        *("\\v1\\models", "/\\v1/models", "/v1\\models", "@evil/v1/models", "v1/models", "http:/v1/models"),
        *("http://localhost/v1/models", "http://evil.example/v1/models", "https://localhost/v1/models"),
        *("HTTP://LOCALHOST/v1/models", "http://localhost:80/v1/models", "http://a:b@localhost/v1/models"),
        *("http:///v1/models", "file:///etc/passwd", "*", "?", "#", "/v1/models/..", "/v1/models/../models"),
        *(
            "/pages/../v1/models",
            "/pages/..%2f..%2fetc/passwd",
            "/pages/%2e%2e/%2e%2e/v1/models",
            "/pages/page.css/../x",
        ),
        *("/" + "../" * 100 + "etc/passwd", "/" + "a/" * 5000, "/v1/" + "%41" * 5000, "/health/live/../../v1/models"),
        *("/debug/kv/../../health", "/admin/../v1/models", "//evil.example/%2f..", "/v1/models/\u00e9", "/\u202e"),
    ):
        raw = request("GET", target)
        allowed = NO_ENTRY | {200 if target in {"/health?/../v1/models", "/health#/../v1/models"} else 404}
        yield _one("targets", f"GET {target[:60]}", raw, allowed | {414, 431}, check=check, quotes=("/etc/passwd",))
        keyed = request("GET", target, headers=[facts.authorization])
        yield _one("targets", f"GET {target[:60]} with the key", keyed, NO_ENTRY | {200, 307, 414, 431})


def _hosts(facts: Facts) -> Iterator[Case]:
    check = _tells_nothing(facts)

    def goes_nowhere(answer: Answer) -> str | None:
        location = answer.header("location")
        return f"redirects to {location!r}" if location not in {None, "../tokenize"} else None

    for host in (
        *("a/health", "a?x=", "a#", "a/health?", "localhost@evil.example", "evil.example", "evil.example:80"),
        *("[::1", "[::1]:", "a b", "", "localhost:99999", "localhost:-1", "a" * 10_000, "%", "\u00e9.example", "a\\b"),
        *("localhost/v1/models?", "127.0.0.1.evil.example", "localhost.", "0", "*", "localhost,evil.example"),
    ):
        raw = request("GET", "/v1/models", host=host)
        yield _one("hosts", f"Host: {host[:40]!r}", raw, {400, 401, 403, 421}, check=check)
        slash = request("POST", "/tokenize/", b"{}", host=host, headers=[facts.authorization])
        allowed = {307, 400, 403, 404, 405, 421}
        yield _one("hosts", f"a slash too many at {host[:40]!r}", slash, allowed, check=goes_nowhere)
    both = request("GET", "/v1/models", headers=["Host: evil.example"])
    yield _one("hosts", "two of them", both, {400, 401})
    none = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
    yield _one("hosts", "none", none, {400, 401})


def _methods(facts: Facts) -> Iterator[Case]:
    for method in (
        *("BREW", "get", "PROPFIND", "CONNECT", "M-SEARCH", "SOURCE", "PURGE", "A" * 5000, "GET\x00", "G\u00cbT", "'"),
        *("GET;", "*", "0", "-", "TRACE", "QUERY", "X" * 19, "PRI"),
    ):
        raw = request(method, "/v1/models", headers=[facts.authorization])
        yield _one("methods", f"{method[:24]!r}", raw, {400, 405, 414, 431, 501, 0 if method == "CONNECT" else 400})
    for path in ("/health", "/v1/models"):
        for method in ("HEAD", "OPTIONS"):
            raw = request(method, path, headers=[facts.authorization])
            yield _one("methods", f"{method} {path}", raw, {200, 405})


def _keys(facts: Facts) -> Iterator[Case]:
    key = facts.key

    def case(name: str, headers: list[str], expected: set[int]) -> Case:
        return _one("keys", name, request("GET", "/v1/models", headers=headers), expected)

    for scheme in ("Bearer", "bearer", "BEARER"):
        yield case(f"{scheme} and the key", [f"Authorization: {scheme} {key}"], {200})
    yield case("x-api-key", [f"x-api-key: {key}"], {200})
    yield case("two spaces before it", [f"Authorization: Bearer  {key}"], {200})
    yield case("white space behind it", [f"Authorization: Bearer {key} \t"], {200})
    for name, lines in {
        "nothing after the scheme": ["Authorization: Bearer"],
        "a tab before it": [f"Authorization: Bearer\t{key}"],
        "letters beyond ASCII": ["Authorization: Bearer \u00e9"],
        "Basic": [f"Authorization: Basic {key}"],
        "no scheme": [f"Authorization: {key}"],
        "the key twice": [f"Authorization: Bearer {key},{key}"],
        "two headers": [f"Authorization: Bearer {key}"] * 2,
        "a right and a wrong one": [f"Authorization: Bearer {key}", "Authorization: Bearer wrong"],
        "a wrong and a right one": ["Authorization: Bearer wrong", f"Authorization: Bearer {key}"],
        "in upper case": [f"Authorization: Bearer {key.upper()}"],
        "without its last letter": [f"Authorization: Bearer {key[:-1]}"],
        "with a letter more": [f"Authorization: Bearer {key}x"],
        "another first letter": [f"Authorization: Bearer X{key[1:]}"],
        "a NUL after it": [f"Authorization: Bearer {key}\x00"],
        "percent-encoded": [f"Authorization: Bearer %73{key[1:]}"],
        "in quotes": [f'Authorization: Bearer "{key}"'],
        "a pattern": ["Authorization: Bearer *"],
        "in Proxy-Authorization": [f"Proxy-Authorization: Bearer {key}"],
        "in a cookie": [f"Cookie: authorization=Bearer {key}; api_key={key}"],
        "SQL": ["Authorization: Bearer ' OR 1=1 --"],
        "twice in x-api-key": [f"x-api-key: {key}"] * 2,
        "with its scheme in x-api-key": [f"x-api-key: Bearer {key}"],
        "20 KB": ["Authorization: Bearer " + "x" * 20_000],
    }.items():
        yield case(name, lines, {401, 400} if "NUL" in name else {401})
    yield case("60 KB", ["Authorization: Bearer " + "x" * 60_000], {431, 400})
    for path in (f"/v1/models?api_key={key}", f"/v1/models?key={key}", f"/v1/models?access_token={key}"):
        yield _one("keys", "in the query", request("GET", path), {401})


def _ids(facts: Facts) -> Iterator[Case]:
    """What a client calls its request is either taken as it is or replaced, and never breaks a header or a line."""

    def check(answer: Answer) -> str | None:
        found = [value for name, value in answer.headers if name == "x-request-id"]
        if len(found) != 1 or not _ID.fullmatch(found[0]):
            return f"x-request-id {found!r}"
        return "a header was injected" if answer.header("set-cookie") else None

    body = json.dumps({"prompt": "a"}).encode()
    for value in (
        *("a%0d%0aSet-Cookie: x", "a\tb", "x" * 10_000, "\U0001f600", "", " ", "../../etc/passwd", "a b", "{{7*7}}"),
        *(
            "c",
            "cmpl",
            "-",
            ".",
            "http://127.0.0.1:9/",
            "%s%s%n",
            "\x7f",
            '"',
            "\\u0000",
            "${jndi:ldap://127.0.0.1:9/a}",
        ),
    ):
        raw = request("POST", "/tokenize", body, headers=[facts.authorization, f"X-Request-Id: {value}"])
        yield _one("request ids", repr(value[:30]), raw, {200, 400} if "\x7f" in value else {200}, check=check)
    names = [facts.authorization, "X-Request-Id: one", "X-Request-Id: two"]
    yield _one("request ids", "two of them", request("POST", "/tokenize", body, headers=names), {200, 400}, check=check)
