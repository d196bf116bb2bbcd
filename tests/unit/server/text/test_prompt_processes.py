"""The processes that render templates: bounds on time and memory, and what is left of them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from quire_engine.contract.errors import ModelLoadError
from quire_server.errors import ApiError, BadRequest, ContextLengthExceeded, NotReady
from quire_server.text.prompt import ChatTemplate
from support.chat_templates import CHAT, CHATML, TOKENIZER, templates
from support.covering import few
from support.processes import children_running, lives


@pytest.fixture
def make() -> Iterator[object]:
    with templates() as build:
        yield build


LOOPS = {
    "for_ever": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "doubling": "{% set s = namespace(x='xy') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "padding": "{{ 'x'.rjust(messages | length * 10 ** 11) }}",
    "huge_number": "{{ (messages | length * 9) ** (10 ** 9) }}",
    "huge_range": "{% for i in range(999999999) %}x{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("name", few(LOOPS, "padding", "recursion"))
def test_a_runaway_template_is_a_bad_request_in_time(make, name: str) -> None:
    template = make("{% if messages[0].content == 'run' %}" + LOOPS[name] + "{% endif %}done")
    start = time.monotonic()
    with pytest.raises(BadRequest):
        template.render([{"role": "user", "content": "run"}])
    assert time.monotonic() - start < 30
    assert template.render(CHAT) == "done"


def test_a_template_that_always_loops_still_starts_and_refuses(make) -> None:
    template = make(LOOPS["for_ever"], time_limit=0.3)
    with pytest.raises(BadRequest, match="limits"):
        template.render(CHAT)


def test_an_endless_compilation_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="limits"):
        ChatTemplate("{{ 9 ** (10 ** 9) }}", TOKENIZER, time_limit=0.3)  # constants are folded while compiling


def test_a_slow_render_does_not_hold_up_another(make) -> None:
    template = make("{% if messages[0].content == 'run' %}" + LOOPS["for_ever"] + "{% endif %}done", time_limit=1.5)
    template.render(CHAT)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(template.render, [{"role": "user", "content": "run"}])
        time.sleep(0.2)
        for _ in range(5):
            assert template.render(CHAT) == "done"
        assert not slow.done()
        with pytest.raises(BadRequest):
            slow.result()


def test_when_every_process_is_busy_the_wait_is_bounded(make) -> None:
    template = make("{% if messages[0].content == 'run' %}" + LOOPS["for_ever"] + "{% endif %}done", time_limit=0.4)
    with ThreadPoolExecutor(12) as pool:
        start = time.monotonic()
        results = list(pool.map(lambda _: _status(template), range(12)))
        assert time.monotonic() - start < 30
    assert set(results) == {400, 503}
    assert template.render(CHAT) == "done"


def test_the_length_of_the_prompt_is_bounded(make) -> None:
    template = make("{{ messages[0].content }}", max_chars=100)
    assert template.render([{"role": "user", "content": "x" * 100}]) == "x" * 100
    with pytest.raises(ContextLengthExceeded, match="100 characters"):
        template.render([{"role": "user", "content": "x" * 101}])


def test_deep_messages_are_a_bad_request(make) -> None:
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequest):
        make(CHATML).render([{"role": "user", "content": "x", "extra": deep}])


def test_many_threads_render_alike(make) -> None:
    template = make(CHATML)
    expected = [template.render([{"role": "user", "content": str(i)}]) for i in range(50)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(50))) == expected


# The processes


def test_a_killed_process_is_replaced(make) -> None:
    template = make("done")
    for child in _template_processes():
        child.kill()
        child.wait()
    assert template.render(CHAT) == "done"


def test_a_process_that_is_killed_at_work_is_asked_once_more_as_a_new_one(make) -> None:
    template = make("done")
    killed: list[int] = []

    def kill(pid: int) -> None:
        if len(killed) < most:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    for process in template.processes:
        process.before_asking = kill
    most = 1
    assert template.render(CHAT) == "done"
    most = 3
    with pytest.raises(NotReady, match="was ended"):  # nothing is wrong with the messages
        template.render(CHAT)
    assert len(set(killed)) == 3
    assert template.render(CHAT) == "done"


def test_a_stopped_process_is_replaced_and_costs_one_chat_a_moment(make) -> None:
    """Its own limits do not run while it is stopped, and a signal that would end it waits too."""
    template = make("{{ messages[0].content }}")
    long = [{"role": "user", "content": "x" * 200_000}]  # more than a pipe takes: the write waits as well
    for messages in (CHAT, long):
        stopped = _template_processes()
        for child in stopped:
            child.suspend()
        try:
            start = time.monotonic()
            assert template.render(messages) == messages[0]["content"]
            assert time.monotonic() - start < 30
            assert not lives(stopped[-1].pid) or not lives(stopped[0].pid)
        finally:
            for child in _template_processes():
                child.resume()


def test_no_process_is_left_behind() -> None:
    before = set(_template_processes())
    template = ChatTemplate("done", TOKENIZER)
    assert set(_template_processes()) > before
    template.close()
    assert set(_template_processes()) == before
    dropped = ChatTemplate("done", TOKENIZER)
    del dropped
    gc.collect()
    assert set(_template_processes()) == before


def test_a_process_ends_with_a_parent_that_had_no_time_to_stop_it() -> None:
    script = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "import psutil, test_prompt\n"
        "template = test_prompt.ChatTemplate('done', test_prompt.TOKENIZER)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os._exit(1)\n"
    )
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(tests), str(tests.parents[2])], capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 300
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _status(template: ChatTemplate) -> int:
    try:
        template.render([{"role": "user", "content": "run"}])
    except ApiError as error:
        return error.status
    return 200


def _template_processes() -> list[psutil.Process]:
    return children_running(os.getpid(), "template_worker.py")
