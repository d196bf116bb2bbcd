"""A server whose log nobody reads: it serves, and it ends."""

from __future__ import annotations

import os

import httpx
import pytest

from hostile.rows.trust_logs import PATH, unread

pytestmark = pytest.mark.e2e

NUM_LINES = 400  # twice what a pipe holds


def test_a_log_that_nobody_reads_stops_nobody():
    reader, writer = os.pipe()
    with unread(writer) as (process, url), httpx.Client(base_url=url, timeout=120) as client:
        os.close(writer)
        for _ in range(NUM_LINES):
            assert client.get(PATH).status_code == 404
        reply = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
        assert reply.json()["usage"]["completion_tokens"] == 4
        process.terminate()
        assert process.wait(20) == 0
    os.close(reader)
