"""What judges a server under attack: planted errors, times and answers must be found, good ones not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from hostile import hygiene, report
from hostile.case import Answer, Case, exchange, request
from hostile.corpus import access, fields, framing, prompts, texts, values
from hostile.corpus.facts import KEY, Facts, Raw, dumps
from hostile.verdict import judge
from hostile.watch import Scrape, Seen, Watch, longest
from support.fakes import listening, make_app, make_state

HEADERS = [("content-type", "application/json"), ("x-request-id", "a")]
QUIET = Seen(
    gap=0.01, usual=0.01, live=0.01, live_failures=0, stall=0.001, rss=1, grown=0, broken=0, changed=0, late=0.0
)
CASE = Case(kind="a", name="b", path="/v1/completions", parts=lambda: (b"",))


def refusal(message: str = "no", **more: object) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Answer(status=400, headers=HEADERS, body=json.dumps({"error": error | more}).encode())


def found(answer: Answer, path: str = "/v1/completions", **more: tuple[str, ...]) -> list[str]:
    return list(hygiene.faults(answer, path=path, **more))


def test_a_good_error_is_good() -> None:
    assert found(refusal("The model 'a' does not exist; there are 3.5 of 0x… at /v1/models.")) == []
    body = {"type": "error", "error": {"type": "a", "message": "b"}, "request_id": "c"}
    assert found(replace_body(refusal(), body), "/v1/messages") == []


def replace_body(answer: Answer, value: object) -> Answer:
    answer.body = json.dumps(value).encode()
    return answer


@pytest.mark.parametrize(
    "planted",
    [
        "Traceback (most recent call last)",
        'File "/srv/a", line 3, in f',
        "<quire_server.text.prompt.ChatTemplate object at 0x7f00aa>",
        "at 0x7f00aabbccdd",
        "no such file: /home/user/model",
        "/opt/quire/server.py",
        "<class 'int'>",
        "pydantic_core.ValidationError of pydantic",
        "quire_server.errors.BadRequest",
    ],
)
def test_what_a_message_shows_of_the_inside_is_found(planted: str) -> None:
    assert found(refusal(planted))
    assert found(replace_body(refusal(), {"error": planted}))


def test_other_faults_of_an_error_are_found() -> None:
    assert found(refusal("x" * 3000))
    assert found(replace_body(refusal(), {"detail": "Not Found"}))
    assert found(replace_body(refusal(), [1]))
    assert found(refusal(more=1))
    assert found(refusal(), "/v1/messages")
    assert found(Answer(status=400, headers=HEADERS, body=b"<html>"))
    assert found(Answer(status=400, headers=[*HEADERS, ("server", "uvicorn 1.2")], body=refusal().body))
    assert found(Answer(status=400, headers=HEADERS[:1], body=refusal().body))
    assert found(Answer(status=400, headers=[("content-type", "text/html"), HEADERS[1]], body=refusal().body))
    assert found(refusal("your prompt was quokka 7391"), secrets=("quokka 7391",))
    assert found(refusal("no model '/tmp/a'"))
    assert not found(refusal("no model '/tmp/a'"), sent=("/tmp/a",))


def test_each_broken_promise_is_told() -> None:
    assert judge(CASE, refusal(), [], QUIET).is_kept
    assert "500, not 400" in judge(CASE, Answer(status=500, headers=HEADERS), [], QUIET).faults[0]
    assert "closed without an answer" in judge(CASE, Answer(), [], QUIET).faults[0]
    assert "no answer within" in judge(CASE, Answer(hung=True), [], QUIET).faults[0]
    assert "afterwards /health/live answers 503" in judge(CASE, refusal(), ["/health/live answers 503"], QUIET).faults
    checked = replace(CASE, check=lambda answer: "wrong text")
    assert judge(checked, refusal(), [], QUIET).faults == ["wrong text"]
    for seen in (replace(QUIET, live_failures=1), replace(QUIET, broken=1), replace(QUIET, changed=1)):
        assert len(judge(CASE, refusal(), [], seen).faults) == 1
    for seen in (replace(QUIET, stall=0.11), replace(QUIET, gap=0.3), replace(QUIET, live=0.3)):
        verdict = judge(CASE, refusal(), [], seen)
        assert (verdict.faults, len(verdict.late), verdict.is_kept) == ([], 1, False)


def test_the_report_names_the_worst_and_what_was_broken() -> None:
    slow = judge(replace(CASE, name="brackets"), refusal(), [], replace(QUIET, stall=12.0))
    text = "\n".join(report.lines([slow, judge(CASE, refusal(), [], QUIET)], 1.0))
    assert "12000.0 ms  a: brackets" in text
    assert "1 requests broke promises" in text
    assert "the event loop was held 12000 ms" in text


def exposition(*counts: int, total: float) -> Scrape:
    bounds = ("0.1", "1.0", "+Inf")
    lines = [f'a_bucket{{le="{bound}",model_name="m"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
    return Scrape("\n".join(["# HELP a b", *lines, f'a_sum{{model_name="m"}} {total}']))


def test_the_longest_of_a_histogram_is_bounded_from_above() -> None:
    before = exposition(5, 6, 6, total=1.0)
    assert longest(before, before, "a") == 0.0
    assert longest(before, exposition(9, 10, 10, total=1.02), "a") == pytest.approx(0.02)  # the sum says more
    assert longest(before, exposition(5, 7, 7, total=1.5), "a") == pytest.approx(0.5)
    assert longest(before, exposition(5, 6, 7, total=13.0), "a") == pytest.approx(12.0)  # beyond all bounds
    assert longest(before, exposition(9, 9, 10, total=13.5), "a") == pytest.approx(12.5)


def facts(**changes: object) -> Facts:
    values = {
        "document": make_app().openapi(),
        "model": "fake",
        "vocab_size": 300,
        "special_tokens": ("<s>",),
        "max_model_len": 512,
        "max_body_bytes": 1 << 20,
        "header_timeout": 2.0,
    }
    return Facts(**(values | changes))


@pytest.mark.matrix  # the corpus is that of `make hostile`
@pytest.mark.anyio
async def test_the_corpus_has_cases_of_every_kind_for_every_route() -> None:
    whole = facts()
    parts = {part.__name__: list(part.cases(whole)) for part in (access, texts, framing, values, prompts, fields)}
    assert sum(map(len, parts.values())) > 1500
    assert all(len(cases) > 60 for cases in parts.values())
    posts = {path: operations.get("post", {}) for path, operations in whole.document["paths"].items()}
    bodies = {path for path, post in posts.items() if fields.takes_json(post) and not path.startswith(fields.OPERATORS)}
    assert {case.path for case in parts["hostile.corpus.fields"]} == bodies
    assert all(case.expected for cases in parts.values() for case in cases)
    changed = json.loads(json.dumps(whole.document))
    changed["paths"] = {"/v1/new": changed["paths"]["/tokenize"]}
    with pytest.raises(LookupError, match="/v1/new is new"):
        list(fields.cases(facts(document=changed)))


def test_raw_json_is_sent_as_it_is() -> None:
    assert dumps({"a": [Raw("NaN"), {"b": "c"}], "d": None}) == '{"a":[NaN,{"b":"c"}],"d":null}'


@pytest.mark.anyio
async def test_a_server_is_watched_and_a_held_event_loop_is_found() -> None:
    """The whole way: a bystander of its own process, a canary, and a loop that somebody holds."""
    app = make_app(make_state(api_key=(KEY,)))

    @app.get("/hold")
    async def hold() -> str:
        import time

        time.sleep(0.4)  # noqa: ASYNC251
        return "held"

    held = Case(
        kind="a", name="hold", parts=lambda: (request("GET", "/hold", headers=[f"Authorization: Bearer {KEY}"]),)
    )
    async with listening(app) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with Watch(f"http://127.0.0.1:{server.port}", headers=headers, streams=1, tokens=20, quiet=0.5) as watch:
            assert await watch.canary() == []
            await watch.seen()
            assert (await exchange("127.0.0.1", server.port, held)).status == 200
            await asyncio.sleep(0.2)
            seen = await watch.seen()
    # At least as long as it was held: a busy machine adds to what is seen and takes nothing from it.
    assert seen.stall > 0.25
    assert seen.live > 0.3
