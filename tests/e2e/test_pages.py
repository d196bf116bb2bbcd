"""The landing page and the API reference in a real browser: a chat that streams, a key that is asked for, any size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.served import Served
from support.browser import Browser, find

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

KEY = "sk-ä-1"
SIZES = {"wide": (1200, 800, False), "dark": (1200, 800, True), "phone": (390, 844, False)}
# The least contrast of text with what lies behind it, by the formula of WCAG 2: 4.5 is its level AA.
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => rgb(text).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((rgb(colour)[3] ?? 1) > 0) return colour;
    }
  };
  const ratios = [...document.querySelectorAll("body *")]
    .filter((node) => node.checkVisibility() && [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((node) => [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a))
    .map(([high, low]) => (high + 0.05) / (low + 0.05));
  return Math.min(...ratios);
})()"""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as started:
        yield started


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with Served("--api-key", KEY) as started:
        yield started


def keep(browser: Browser, name: str) -> None:
    """A picture for people, where SCREENSHOTS names a folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png")


def ask(browser: Browser, text: str) -> None:
    browser.type("#text", text)
    browser.press_enter()


def answered(browser: Browser, count: int) -> None:
    browser.until(f"document.querySelectorAll('article.assistant .small').length === {count}")


@pytest.mark.parametrize("size", SIZES)
def test_a_chat_streams(server: Served, size: str) -> None:
    width, height, dark = SIZES[size]
    with Browser(width=width, height=height, dark=dark) as browser:
        browser.open(server.url + "/")
        browser.until("document.title.startsWith('quire-demo')")
        assert "2,048 tokens" in browser.run("document.getElementById('serving').innerText")
        assert f"{server.url}/v1" in browser.run("document.getElementById('python').innerText")
        # At the page's own temperature the model answers one question in a hundred wrongly.
        browser.run(
            "window.real = fetch; window.fetch = (path, options) => real(path, options?.body ? {...options, body:"
            " JSON.stringify({...JSON.parse(options.body), temperature: 0})} : options)"
        )
        ask(browser, "What is the capital of France?")
        answered(browser, 1)
        assert "Paris" in browser.run("document.querySelector('article.assistant .text').innerText")
        browser.run(
            "window.grew = []; new MutationObserver(() => grew.push("
            "document.querySelectorAll('article.assistant .text')[1]?.innerText.length ?? 0))"
            ".observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true})"
        )
        ask(browser, "Tell me a story.")
        answered(browser, 2)
        assert browser.run("new Set(grew).size") > 4  # piece by piece
        assert browser.run("document.querySelectorAll('article').length") == 4
        assert browser.run("document.documentElement.scrollWidth") <= width  # nothing sticks out
        assert browser.run(CONTRAST) >= 4.5
        keep(browser, f"chat-{size}")
        browser.click("#new")
        assert browser.run("document.querySelectorAll('article').length") == 0
        assert browser.complaints == []
        assert all(address.startswith(server.url) for address in browser.requested if "://" in address)


def test_thoughts_are_folded_and_frames_may_come_in_any_pieces(server: Served) -> None:
    """Events as another piece of the way may cut them: within a character, with comments, with other line ends."""
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.until("document.title.startsWith('quire-demo')")
        browser.run(
            """
            window.fetch = async () => {
              const delta = (value) => `data: ${JSON.stringify({choices: [{index: 0, delta: value}]})}\\n\\n`;
              const text = delta({role: "assistant", content: ""}) + ": keep-alive\\n\\n"
                + delta({reasoning: "Let me "}) + delta({reasoning_content: "see: é😀."})
                + delta({content: "<b>Ça "}).replace(/\\n/g, "\\r\\n") + delta({content: "va.</b>"})
                + 'data: {"choices": [], "usage": {"completion_tokens": 7}}\\n\\ndata: [DONE]\\n\\n';
              const bytes = new TextEncoder().encode(text);
              const stream = new ReadableStream({
                start(controller) {
                  for (let at = 0; at < bytes.length; at += 1) controller.enqueue(bytes.slice(at, at + 1));
                  controller.close();
                },
              });
              return new Response(stream, {headers: {"content-type": "text/event-stream"}});
            };
            """
        )
        ask(browser, "Hello!")
        answered(browser, 1)
        assert browser.run("document.querySelector('article.assistant > .text').textContent") == "<b>Ça va.</b>"
        assert browser.run("document.querySelector('details .text').textContent") == "Let me see: é😀."
        assert not browser.run("document.querySelector('article details').open")
        assert "7 tokens" in browser.run("document.querySelector('article.assistant .small').textContent")


def test_stop_ends_the_answer_here_and_there(server: Served) -> None:
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.until("document.title.startsWith('quire-demo')")
        # The model would end soon by itself: its answers are kept from ending.
        browser.run(
            "window.real = fetch; window.fetch = (path, options) => real(path, options?.body ? {...options, body:"
            " JSON.stringify({...JSON.parse(options.body), ignore_eos: true, max_tokens: 2000})} : options)"
        )
        ask(browser, "Tell me a story.")
        browser.until("document.querySelector('article.assistant .text')?.innerText.length > 40")
        browser.click("#stop")
        browser.until("document.querySelector('article.assistant .hint')?.innerText === 'Stopped.'")
        server.wait_idle(5)
        assert browser.run("document.getElementById('stop').hidden && !document.getElementById('send').hidden")


def test_an_error_is_shown_and_the_question_kept(server: Served) -> None:
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.until("document.title.startsWith('quire-demo')")
        ask(browser, "word " * 3000)
        browser.until("document.querySelector('article.assistant .problem')")
        assert "maximum context length" in browser.run("document.querySelector('.problem').innerText")
        assert browser.run("document.getElementById('text').value.length") > 10_000


def test_the_key_is_asked_for_and_kept_in_the_tab(keyed: Served) -> None:
    with Browser() as browser:
        browser.open(keyed.url + "/")
        browser.until("!document.getElementById('key-form').hidden")
        keep(browser, "key")
        browser.type("#key", "wrong")
        browser.press_enter()
        browser.until("document.getElementById('key-problem').innerText.includes('does not accept')")
        browser.type("#key", KEY)
        browser.press_enter()
        browser.until("document.title.startsWith('quire-demo')")
        ask(browser, "Hello!")
        answered(browser, 1)
        browser.click("[data-keyed]")
        browser.until("document.getElementById('shown').open")
        assert '"quire-demo"' in browser.run("document.querySelector('#shown pre').innerText")
        browser.open(keyed.url + "/docs")  # the same tab: no second question
        browser.until("document.querySelectorAll('.operation').length > 5")
        assert browser.run("document.getElementById('key-form').hidden")
        assert browser.run("localStorage.length + document.cookie.length") == 0


def test_the_reference_describes_and_tries_every_route(keyed: Served) -> None:
    with Browser() as browser:
        browser.open(keyed.url + "/docs")
        browser.until("!document.getElementById('key-form').hidden")
        browser.type("#key", KEY)
        browser.press_enter()
        browser.until("document.querySelectorAll('.operation').length > 5")
        browser.run("for (const one of document.querySelectorAll('.operation, .operation details')) one.open = true")
        browser.until("document.querySelectorAll('.operation form').length > 5")
        browser.run("for (const one of document.querySelectorAll('.operation details')) one.open = true")
        browser.run("for (const one of document.querySelectorAll('label input')) one.value = 'quire-demo'")
        # All but the orders of an operator: a server that drains, or aborts, refuses the others, and adapters are off.
        tried = "[...document.querySelectorAll('.operation form')].filter("
        tried += "(one) => !/\\/admin\\/|_lora_adapter/.test(one.closest('.operation').textContent))"
        browser.run(f"for (const one of {tried}) one.requestSubmit()")
        count = f"{tried}.length"
        browser.until(f"document.querySelectorAll('.operation .ok, .operation .problem').length === {count}")
        problems = browser.run(
            "[...document.querySelectorAll('.operation .problem')].map((one) => one.closest('.operation').innerText)"
        )
        # Nothing is stored by the name that stands in every field, and no step or request has it; files are off.
        # The embedded model is no classifier, and the page knows no body for a route that takes those of four others.
        # The one field of /slots is no text.
        known = ("{response_id}", "/debug/", "/classify", "/invocations", "/v1/files", "/v1/batches", "/slots")
        assert [text.split("\n")[0] for text in problems if not any(name in text for name in known)] == []
        text = browser.run("document.body.innerText")
        for said in ("/v1/chat/completions", "max_tokens", "messages required", "429", "ErrorResponse"):
            assert said in text
        assert browser.run(CONTRAST) >= 4.5
        keep(browser, "docs")
        browser.resize(390, 844)
        wide = "[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll') && !one.closest('pre')"
        wide += " && one.getBoundingClientRect().right > 390).map((one) => one.outerHTML.slice(0, 120))"
        assert browser.run(wide) == []
        assert browser.run("document.documentElement.scrollWidth") <= 390
        keep(browser, "docs-phone")
        assert all(address.startswith(keyed.url) for address in browser.requested if "://" in address)
