"""The dashboard in a real browser beside a server under load: its numbers are those of /metrics, at any size."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from e2e.served import Served
from e2e.test_pages import CONTRAST, keep
from support.browser import Browser, find

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

LIVE = "document.getElementById('state').textContent === 'Live.'"
SMALL = ("--kv-memory", "4MiB", "--max-num-seqs", "8")


@contextmanager
def load(server: Served, streams: int) -> Iterator[None]:
    """So many streams that go on until the end."""
    over = threading.Event()

    def stream(number: int) -> None:
        body = {"prompt": f"{number} Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        while not over.is_set():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    if over.is_set():
                        break

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def tile(name: str) -> str:
    found = f"[...document.querySelectorAll('.tiles div')].find((one) => one.innerText.includes('{name}'))"
    return f"{found}.querySelector('dd').innerText"


def readout(chart: str) -> str:
    return f"document.querySelector('#{chart} .readout').textContent"


def numbers(text: str) -> dict[str, float]:
    """`name 12, other 3.4 ms` by name, without the units."""
    found = re.findall(r"(?:^|[:,] )([^\d:,][^\d,]*?|[^,:]*p\d\d) ([\d.,]*\d)(?= |,|\.|$)", text)
    return {name: float(value.replace(",", "")) for name, value in found}


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def boxes(browser: Browser) -> list[list[float]]:
    script = "[...document.querySelectorAll('section, .tiles div')].map((one) => one.getBoundingClientRect())"
    return browser.run(f"{script}.map((box) => [box.x, box.y, box.width, box.height].map(Math.round))")


def test_the_page_under_load_says_what_the_metrics_say() -> None:
    with Served(*SMALL) as server, Browser(width=1400, height=900) as browser:
        browser.open(server.url + "/dashboard")
        browser.until(LIVE)
        before = boxes(browser)
        with load(server, 12):
            browser.until(f"Number({tile('Running')}) === 8 && Number({tile('Waiting')}) === 4")
            # Streams end and begin anew, so both are looked at until they say it.
            until(lambda: server.metric("quire_requests_running") == 8)
            until(lambda: server.metric("quire_requests_waiting", reason="slots") == 4)
            browser.until(f"{readout('queue')}.includes('for a slot 4')")
            browser.until("document.querySelectorAll('#requests tbody tr').length >= 12")
            browser.until(f"!{readout('itl')}.includes('nothing')")
            assert browser.run("document.querySelectorAll('#blocks path[d^=M]').length") >= 5
            assert boxes(browser) == before, "nothing jumps when there is something to show"
            assert browser.run(CONTRAST) >= 4.5
            keep(browser, "dashboard")
            browser.resize(390, 844)
            browser.until("document.querySelector('#blocks svg').clientWidth < 390")
            assert browser.run("document.documentElement.scrollWidth") <= 390
            keep(browser, "dashboard-phone")
            browser.resize(1400, 900)
        server.wait_idle()
        browser.until(f"{tile('Running')} === '0' && {tile('KV in use')} === '0.0 %'")
        told = numbers(browser.run(readout("blocks")))
        assert told["cached"] == server.metric("quire_kv_blocks", state="cached") > 0
        assert told["pool"] == server.metric("quire_kv_pool_blocks")
        for metric, chart, name in (
            ("quire_sequences_in_system", "little", "L"),
            ("quire_batching_efficiency_ratio", "batching", "computed here"),
        ):
            browser.until(f"{readout(chart)}.startsWith('Now')")
            assert name in browser.run(readout(chart)), metric
        # The reader's cursor, by keyboard: the last second, and the one before it.
        browser.run("document.querySelector('#blocks svg').focus()")
        press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}))"
        browser.run(press)
        assert re.match(r"\d\d:\d\d:\d\d: ", browser.run(readout("blocks")))
        at = browser.run(readout("blocks"))
        browser.run(press)
        assert browser.run(readout("blocks"))[:8] < at[:8]
        assert browser.complaints == []
        assert all(address.startswith((server.url, "about:")) for address in browser.requested)


def test_it_finds_a_server_that_was_started_anew_and_is_legible_in_the_dark() -> None:
    with Browser(dark=True, width=1400, height=900) as browser:
        with Served(*SMALL) as server:
            port = server.url.rpartition(":")[2]
            browser.open(server.url + "/dashboard")
            browser.until(LIVE)
            with load(server, 3):
                browser.until(f"Number({tile('Running')}) === 3")
                assert browser.run(CONTRAST) >= 4.5
                keep(browser, "dashboard-dark")
        browser.until("document.getElementById('state').classList.contains('lost')")
        with Served(*SMALL, "--port", port):
            browser.until(LIVE)
            browser.until(f"{tile('Running')} === '0'")
            # The page shows the old server's numbers until the first ones of the new server, which has nothing cached.
            until(lambda: numbers(browser.run(readout("blocks"))).get("cached") == 0)


def test_what_comes_over_the_wire_stays_text() -> None:
    """Names of models, tenants and requests are shown as they are, whatever they look like."""
    evil = "<img src=x onerror=alert(1)>"
    with Browser() as browser:
        with Served(*SMALL) as server:
            browser.open(server.url + "/dashboard")
            browser.until(LIVE)
            lines = httpx.stream("GET", f"{server.url}/dashboard/events", timeout=120)
            with lines as reply:
                told = [json.loads(line[6:]) for line, _ in zip(reply.iter_lines(), range(3), strict=False) if line]
        first, then = told
        first["server"]["model"] = evil
        then["now"]["frame"]["tenants"] = [{"name": evil, "running": 1, "waiting": 0, "service": 5.0}]
        row = dict.fromkeys(("at", "n", "prompt_tokens", "cached_tokens", "generated_tokens", "queue", "kv_wait"), 1)
        row |= {"id": evil, "state": evil, "waited": 0, "prefill": 1, "decode": 1, "preemptions": 0}
        then["now"]["requests"] = [row]
        then["now"]["alerts"] = [{"name": evil, "firing": True, "summary": evil, "advice": evil}]
        replica = {"name": evil, "state": evil, "streams": 1, "prompt_tokens_ahead": 2, "predicted": 0.1, "seen": None}
        then["now"]["replicas"] = {"rows": [replica], "routes": {evil: 3}, "moved": 1}
        stream = "".join(f"data: {json.dumps(message)}\n\n" for message in (first, then))
        reply_type = "{headers: {'content-type': 'text/event-stream'}}"
        browser.run(f"void (window.fetch = async () => new Response({json.dumps(stream)}, {reply_type}))")
        browser.until("document.querySelector('#alerts .firing')")
        for place in ("serving", "tenants", "alerts", "replicas", "replicas-note"):
            assert evil in browser.run(f"document.getElementById('{place}').innerText"), place
        assert browser.run("document.querySelector('#requests tbody td').title") == evil
        assert browser.run("document.querySelectorAll('main img, #serving img, .alerts img').length") == 0
