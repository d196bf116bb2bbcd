"""Async tests of the server run on the event loop that serves: uvloop where there is one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": find_spec("uvloop") is not None}
