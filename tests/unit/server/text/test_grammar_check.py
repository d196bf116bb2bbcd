"""Grammars before the engine: verdicts, their cache, and processes that hostile ones cannot hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import time

import psutil
import pytest

from quire_engine.demo import demo_model_path
from quire_server.errors import BadRequest, NotReady
from quire_server.text import grammar_check
from quire_server.text.grammar_check import Grammar, GrammarCheck
from support.covering import few
from support.grammar_bombs import BOMBS
from support.grammars import verdict
from support.processes import children_running

pytestmark = pytest.mark.anyio

WHOLE = 'start: "yes" | "no"'
EBNF = r"""
# a sum
root ::= sum "=" number   # and its result
  | "nothing"
sum ::= number (
  [-+] number
)*
number ::= [0-9]+ | "(" sum ")" | "\"#\""
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def check(anyio_backend: str):
    made = GrammarCheck(demo_model_path(), [2])
    yield made
    made.close()


async def refusal(check: GrammarCheck, rules: str, client: str = "") -> str:
    with pytest.raises(BadRequest) as refused:
        await check.accept(Grammar(rules=rules, client=client), param="guided_grammar")
    assert refused.value.param == "guided_grammar"
    assert refused.value.message.startswith("'guided_grammar' cannot be enforced: ")
    assert len(refused.value.message) < 600
    return refused.value.message


def processes() -> list[psutil.Process]:
    return children_running(os.getpid(), "grammar_worker.py")


async def test_rules_pass_as_they_are(check: GrammarCheck):
    assert await check.accept(Grammar(rules=WHOLE), param="p") == WHOLE


async def test_a_clients_lark_passes_as_it_is(check: GrammarCheck):
    lark = "%llguidance {}\nstart: a+\na: /x/"
    assert await check.accept(Grammar(rules="start: @client", client=lark), param="p") == lark


async def test_special_tokens_have_their_ids_in_a_clients_lark_and_are_text_within_quotes(check: GrammarCheck):
    lark = 'start: <think> "<think>" /<think>/ <|im_end|>? // <think>\n'
    text = await check.accept(Grammar(rules="start: @client", client=lark), param="p")
    assert text == 'start: <[6]> "<think>" /<think>/ <[2]>? // <think>\n'
    message = await refusal(check, "start: @client", "start: <nothing>")
    assert "unknown special token" in message
    assert "<think>" in message
    quoted = await check.accept(Grammar(rules='start: "a <think> b" /<.think>/'), param="p")
    assert verdict(quoted, "a <think> b</think>", is_plain=True) == "whole"


async def test_ebnf_is_translated(check: GrammarCheck):
    text = await check.accept(Grammar(rules="start: @client", client=EBNF), param="p")
    for whole in ("1=2", "1+2-(3+4)=5", '"#"=1', "nothing"):
        assert verdict(text, whole) == "whole", whole
    for wrong in ("1", "=1", "1+=2", "no", "1=2 "):
        assert verdict(text, wrong) != "whole", wrong


async def test_a_clients_grammar_has_its_place_in_ours(check: GrammarCheck):
    for client in (EBNF, 'start: sum\nsum: "1=2"'):
        text = await check.accept(Grammar(rules="start: <[0]> @client", client=client), param="p")
        assert verdict(text, "<|endoftext|>1=2") == "whole"
        assert verdict(text, "1=2") != "whole"


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ("hello", "neither a rule 'start:'"),
        ('{"grammars": []}', "neither Lark"),
        ("root ::= foo", "Rule 'foo' not found"),
        ('root ::= "abc', "end of input"),
        ("root ::= 'abc'", "double quotes"),
        ('a ::= "x"', "root"),
        pytest.param("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply", id="brackets"),
        ("start: foo", 'unknown name: "foo"'),
        ('start: "a', "lexer error"),
        ("start: /(?=a)/", "look-ahead"),
        ("start: start", "no text fulfils it"),
    ],
)
async def test_refusals_say_why(check: GrammarCheck, client: str, said: str):
    assert said in await refusal(check, "start: @client", client)


async def test_the_reason_quotes_nothing_of_ours(check: GrammarCheck):
    message = await refusal(check, 'start: %json {"x-guidance": {}, "type": "wrong"}')
    assert "x-guidance" not in message
    assert "Invalid type: wrong" in message


async def test_verdicts_are_kept_and_bounded(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    ask = GrammarCheck._ask

    async def counted(self: GrammarCheck, grammar: Grammar):
        asked.append(grammar.rules)
        return await ask(self, grammar)

    monkeypatch.setattr(GrammarCheck, "_ask", counted)
    monkeypatch.setattr(grammar_check, "_MAX_VERDICTS", 2)
    for _ in range(2):
        await check.accept(Grammar(rules=WHOLE), param="p")
        await refusal(check, "start: foo")
    assert asked == [WHOLE, "start: foo"]
    await check.accept(Grammar(rules='start: "third"'), param="p")
    await check.accept(Grammar(rules=WHOLE), param="p")
    assert asked[2:] == ['start: "third"', WHOLE]
    await check.accept(Grammar(rules=WHOLE), param="p", scope="tenant a")
    await check.accept(Grammar(rules=WHOLE), param="p", scope="tenant a")
    assert asked[4:] == [WHOLE], "which another scope has not tried for it"


async def test_no_process_before_the_first_grammar_and_none_is_left(check: GrammarCheck):
    assert processes() == []
    await check.accept(Grammar(rules=WHOLE), param="p")
    assert len(processes()) == 1
    check.close()
    assert processes() == []
    dropped = GrammarCheck(demo_model_path(), [])
    await dropped.accept(Grammar(rules=WHOLE), param="p")
    del dropped
    gc.collect()
    assert processes() == []


async def test_a_killed_process_is_replaced(check: GrammarCheck):
    await check.accept(Grammar(rules=WHOLE), param="p")
    for child in processes():
        child.kill()
        child.wait()
    assert await check.accept(Grammar(rules='start: "a"'), param="p")


async def test_a_stopped_process_is_replaced(check: GrammarCheck):
    await check.accept(Grammar(rules=WHOLE), param="p")
    (stopped,) = processes()
    stopped.suspend()
    assert await check.accept(Grammar(rules='start: "a"'), param="p")
    assert stopped not in processes()


async def test_a_tokenizer_that_cannot_be_read_refuses(tmp_path):
    check = GrammarCheck(tmp_path, [])
    assert "No such file" in await refusal(check, WHOLE)
    check.close()


@pytest.mark.parametrize("name", few(BOMBS, *list(BOMBS)[::4]))
async def test_bombs_end_in_time_and_hold_nobody_up(check: GrammarCheck, name: str):
    longest, last = 0.0, time.monotonic()

    async def watch() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    watching = asyncio.create_task(watch())
    start = time.monotonic()
    with contextlib.suppress(BadRequest, NotReady):  # too costly, or the machine is too busy to tell
        await check.accept(BOMBS[name], param="p")
    assert time.monotonic() - start < 60
    watching.cancel()
    assert longest < 5, "the event loop was held"


async def test_time_is_bounded_and_the_verdict_kept():
    check = GrammarCheck(demo_model_path(), [2], time_limit=0.01)
    slow = Grammar(rules="start: %json " + json.dumps({"enum": [f"v{i}" * 4 for i in range(6000)]}))
    with pytest.raises((BadRequest, NotReady)) as refused:
        await check.accept(slow, param="p")
    assert "too long" in refused.value.message or "busy" in refused.value.message
    check.close()


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    check = GrammarCheck(demo_model_path(), [2])
    await check.accept(Grammar(rules=WHOLE), param="p")
    (process,) = processes()
    assert process.rlimit(psutil.RLIMIT_AS) == (grammar_check._MEMORY_BYTES, grammar_check._MEMORY_BYTES)
    assert process.nice() > psutil.Process().nice()
    check.close()


async def test_when_every_process_is_busy_the_wait_is_bounded(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_check, "_PATIENCE", 0.05)
    for _ in range(grammar_check._NUM_PROCESSES):
        await check._turns.acquire()
    with pytest.raises(NotReady, match="busy"):
        await check.accept(Grammar(rules=WHOLE), param="p")


async def test_many_at_once_get_their_own_verdicts(check: GrammarCheck):
    rules = [f'start: "{i}" | "x{i}"' for i in range(40)]
    assert await asyncio.gather(*(check.accept(Grammar(rules=each), param="p") for each in rules)) == rules
