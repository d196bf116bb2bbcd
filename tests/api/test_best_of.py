"""`best_of` of completions: so many are generated, those with the likeliest tokens come back, all are counted."""

from __future__ import annotations

import pytest

from quire_engine.contract.types import TokenLogprobs
from quire_server.answering.answer import likeliest
from quire_server.answering.choice import ChoiceDelta
from support import fake_engine
from support.completing import run
from support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

# By choice: what it says, the logarithms of its tokens' probabilities, their means -2, -1, -1.5 and -3.
TEXTS = (b"aaaa", b"bb", b"cccc", b"d")
LOGPROBS = {ord("a"): -2.0, ord("b"): -1.0, ord("c"): -1.5, ord("d"): -3.0}


def engine() -> FakeEngine:
    return FakeEngine(replies=lambda request, choice: (*TEXTS[choice], 257))


@pytest.fixture(autouse=True)
def _told(monkeypatch):
    def logprobs(token, wanted, named=()):
        return TokenLogprobs(token_id=token, logprob=LOGPROBS.get(token, -1.5), rank=1)

    monkeypatch.setattr(fake_engine, "fake_logprobs", logprobs)


async def texts(**fields) -> list[str]:
    reply = await run(engine(), max_tokens=8, **fields)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
    return [choice["text"] for choice in reply["choices"]]


async def test_the_likeliest_by_token_come_back_best_first():
    assert await texts(best_of=4) == ["bb"]
    assert await texts(best_of=4, n=2) == ["bb", "cccc"]
    assert await texts(best_of=4, n=4) == ["aaaa", "bb", "cccc", "d"]  # nothing to choose
    assert await texts(best_of=1) == ["aaaa"]


async def test_each_prompt_has_its_own():
    assert await texts(best_of=3, n=1, prompt=["x", "y"]) == ["bb", "bb"]


async def test_all_are_counted_and_nothing_is_shown_that_was_not_asked_for():
    reply = await run(engine(), max_tokens=8, best_of=4)
    assert reply["usage"]["completion_tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert reply["choices"][0]["logprobs"] is None
    shown = await run(engine(), max_tokens=8, best_of=4, logprobs=0)
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -1.0, -1.5]


async def test_of_equals_the_first_comes_back():
    same = [ChoiceDelta(index=i, prompt=0, text=str(i)) for i in range(3)]
    assert [choice.text for choice in likeliest(same, 2)] == ["0", "1"]


async def test_a_token_that_cannot_be_is_the_least_likely():
    def choice(index, *logprobs):
        told = [TokenLogprobs(token_id=1, logprob=value, rank=1) for value in logprobs]
        return ChoiceDelta(index=index, prompt=0, logprobs=told)

    first, second = choice(0, float("-inf"), -0.1), choice(1, -5.0)
    assert likeliest([first, second], 1)[0].logprobs == second.logprobs
