"""The API reference in a real browser, and the key that the pages ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.served import Served
from support.browser import CONTRAST, Browser, find

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

KEY = "sk-ä-1"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with Served("--api-key", KEY) as started:
        yield started


def keep(browser: Browser, name: str) -> None:
    """A picture for people, where SCREENSHOTS names a folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png")


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
        browser.type("#text", "Hello!")
        browser.press_enter()
        browser.until("document.querySelector('article.assistant .stats')")
        browser.click("[data-keyed]")
        browser.until("document.getElementById('shown').open")
        assert '"quire-demo"' in browser.run("document.querySelector('#shown pre').innerText")
        browser.open(keyed.url + "/docs")  # the same tab: no second question
        browser.until("document.querySelectorAll('.operation').length > 5")
        assert browser.run("document.getElementById('key-form').hidden")
        assert KEY not in browser.run("JSON.stringify(localStorage) + document.cookie")


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
        # Nothing is stored by the name that stands in every field, no step or request has it; files and views are off.
        # The embedded model is no classifier.
        # The one field of /slots is no text.
        known = ("{response_id}", "/classify", "/v1/files", "/v1/batches", "/slots")
        # This server has no admin key, so that all of /debug is closed, and says so.
        problems = [text for text in problems if not any(name in text for name in known)]
        assert [text.split("\n")[0] for text in problems if not ("/debug" in text and "\n403 " in text)] == []
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
