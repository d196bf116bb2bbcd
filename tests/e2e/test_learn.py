"""The page /learn in a real browser: sharing, copy on write and preemption of the engine that serves, and its pace."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from e2e.served import Served
from e2e.test_pages import CONTRAST, keep
from support.browser import Browser, find

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

SMALL = ("--kv-memory", "1MiB", "--max-num-seqs", "6", "--max-num-batched-tokens", "64")
ALIKE, CHOICES, LONG, MANY = range(4)  # the page's examples
PATIENCE = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("--set", "learn=true", *SMALL) as started:
        yield started


def opened(browser: Browser, server: Served) -> None:
    browser.open(server.url + "/learn")
    browser.until("document.getElementById('pool-said').textContent.includes('blocks')", PATIENCE)


def send(browser: Browser, example: int) -> None:
    browser.run(f"document.querySelectorAll('#presets button')[{example}].click()")


def pace(browser: Browser, button: str, said: str) -> None:
    browser.click(button)
    browser.until(f"document.getElementById('state').textContent.startsWith('{said}')", PATIENCE)


def happened(browser: Browser, words: str) -> None:
    browser.until(f"document.getElementById('events').textContent.includes('{words}')", PATIENCE)


def waiting(server: Served, count: int) -> None:
    """Until so many requests are in a paused engine."""
    deadline = time.monotonic() + PATIENCE
    while httpx.get(server.url + "/debug/requests").json()["num_live"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def done(title: str) -> str:
    return f"[...document.querySelectorAll('#lessons .done')].some((one) => one.textContent.includes('{title}'))"


def press(browser: Browser, key: str) -> None:
    browser.run(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")


def test_what_happens_is_seen_as_it_happens(server: Served) -> None:
    with Browser(width=1400, height=900) as browser:
        opened(browser, server)
        pace(browser, "#pause", "Paused")
        send(browser, ALIKE)
        waiting(server, 2)  # both come before the next step: the second one waits for what the first one computes
        pace(browser, "#slow", "Slow")
        browser.until("document.querySelectorAll('.block.shared').length === 5", PATIENCE)
        happened(browser, "B waits for a prefix that another computes")
        happened(browser, "B enters with 80 tokens that are cached")
        tables = (
            "[...document.querySelectorAll('#tables tbody tr')].map((row) => [...row.querySelectorAll('.entry.shared')]"
        )
        one, other = browser.run(f"{tables}.map((entry) => entry.textContent))")
        assert one == other == ["0", "1", "2", "3", "4"]
        assert browser.run("document.querySelector('.block.shared').textContent") == "×2"
        keep(browser, "learn-sharing")
        browser.until(done("4 blocks for two"), PATIENCE)
        assert "A and B share the blocks 0, 1, 2, 3, 4" in browser.run("document.getElementById('lessons').textContent")
        assert not browser.run(done("Copy on write"))
        pool = httpx.get(server.url + "/debug/kv").json()
        assert pool["sharing"]["shared"] == 5
        # A row of the page tables, reached with the keyboard, shows its squares.
        browser.run("document.querySelector('#tables tbody tr').focus()")
        assert browser.run("document.querySelectorAll('.block.lit').length") >= 6
        send(browser, CHOICES)
        happened(browser, "copy on write: block")
        browser.until(
            "[...document.querySelectorAll('#lanes .mark')].some((mark) => mark.textContent === '⇒')", PATIENCE
        )
        keep(browser, "learn-copies")
        assert browser.run(CONTRAST) >= 4.5
        browser.run("document.getElementById('speed').value = 0.05")
        browser.run("document.getElementById('speed').dispatchEvent(new Event('change'))")
        send(browser, MANY)
        browser.until("document.getElementById('contiguous-said').textContent.includes('Without room')", PATIENCE)
        happened(browser, "is preempted")
        browser.until(
            "[...document.querySelectorAll('#lanes .mark')].some((mark) => mark.textContent === '✕')", PATIENCE
        )
        keep(browser, "learn-preemption")
        pace(browser, "#slow", "Live")
        server.wait_idle()
        # Graded by the server: the prompt of one that was preempted, alone, gives the same tokens.
        assert browser.run(done("Copy on write"))
        assert not browser.run(done("the same tokens"))
        body = {"max_tokens": 200, "ignore_eos": True, "temperature": 0, "seed": 7}
        for number in range(1, 9):
            prompt = f"{number} is my number. Tell me a story."
            httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": prompt}, timeout=60).raise_for_status()
        browser.until(done("the same tokens"), PATIENCE)
        browser.run("document.querySelector('#lessons input').value = 100000")
        browser.run("document.querySelector('#lessons form').requestSubmit()")
        browser.until("/too many|are needed/.test(document.getElementById('lessons').textContent)", PATIENCE)
        assert not browser.run(done("bounds the ITL"))
        keep(browser, "learn-exercises")
        browser.click("#again")
        browser.until("document.querySelectorAll('#lessons .done').length === 0", PATIENCE)
        assert browser.complaints == []
        assert all(address.startswith((server.url, "about:")) for address in browser.requested)


def test_a_pause_holds_everybody_and_steps_come_one_by_one(server: Served) -> None:
    with Browser(width=1200, height=900, dark=True) as browser:
        opened(browser, server)
        press(browser, " ")
        browser.until("document.getElementById('state').textContent.startsWith('Paused')", PATIENCE)
        assert browser.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        send(browser, LONG)
        waiting(server, 1)
        before = httpx.get(server.url + "/debug/steps").json()["last"] + 1
        for count in (1, 2, 3):
            press(browser, ".")
            browser.until(
                f"document.getElementById('steps-said').textContent.startsWith('Step {before + count - 1:,}:')",
                PATIENCE,
            )
        steps = httpx.get(f"{server.url}/debug/steps?after={before - 1}").json()["steps"]
        assert [each["prefill_tokens"] for each in steps] == [64, 64, 64], "as much as a step holds"
        counts = "[...document.querySelectorAll('#lanes .count')].slice(-3).map((count) => count.textContent)"
        assert browser.run(counts) == ["64"] * 3
        assert browser.run(CONTRAST) >= 4.5
        keep(browser, "learn-paused-dark")
        press(browser, " ")
        browser.until("document.getElementById('state').textContent === 'Live.'", PATIENCE)
        server.wait_idle()


def test_a_closed_page_leaves_nobody_waiting(server: Served) -> None:
    with Browser() as browser:
        opened(browser, server)
        pace(browser, "#pause", "Paused")
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=60)
    assert reply.status_code == 200


def test_it_is_told_to_those_who_do_not_see_it_and_fits_a_phone(server: Served) -> None:
    with Browser(width=390, height=844, still=True) as browser:
        opened(browser, server)
        send(browser, ALIKE)
        happened(browser, "ends (length)")
        assert browser.run("document.documentElement.scrollWidth") <= 390
        named = "(one.labels?.length || one.textContent.trim() || one.getAttribute('aria-label'))"
        nameless = (
            f"[...document.querySelectorAll('button, input, textarea')].filter((one) => !{named} && one.id !== 'key')"
        )
        assert browser.run(f"{nameless}.map((one) => one.outerHTML)") == []
        assert "Steps " in browser.run("document.querySelector('#lanes svg').getAttribute('aria-label')")
        assert browser.run("document.getElementById('pool').getAttribute('aria-describedby')") == "pool-said"
        assert browser.run("document.getElementById('events').getAttribute('role')") == "log"
        still = "[...document.querySelectorAll('.block')].every((one) => getComputedStyle(one).animationName === 'none'"
        assert browser.run(f"{still} && getComputedStyle(one).transitionDuration === '0s')")
        keep(browser, "learn-phone")
        server.wait_idle()


def test_without_the_setting_it_shows_and_does_not_pause() -> None:
    with Served(*SMALL) as plain, Browser() as browser:
        opened(browser, plain)
        assert not browser.run("document.getElementById('pace-note').hidden")
        assert browser.run("['pause', 'step', 'slow', 'speed'].every((id) => document.getElementById(id).disabled)")
        press(browser, " ")
        send(browser, ALIKE)
        happened(browser, "ends (length)")
        assert browser.run("document.getElementById('state').textContent") == "Live."
        evil = "<img src=x onerror=alert(1)>"
        browser.run(f"document.getElementById('prompt').value = '{evil}'.repeat(400)")
        browser.run("document.getElementById('send').requestSubmit()")
        browser.until("document.getElementById('send-problem').textContent.includes('context length')", PATIENCE)
        assert browser.run("document.querySelectorAll('main img').length") == 0
