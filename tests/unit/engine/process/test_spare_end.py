"""A process that waits to be an engine ends in silence with its parent, whatever the parent has left unread."""

from __future__ import annotations

import socket

import pytest

from quire_engine.process.__main__ import _receive_start
from quire_engine.process.transport import FrameDecoder


@pytest.mark.parametrize("unread", [b"", b"progress"], ids=["closed", "reset"])
def test_the_parent_ends(unread: bytes) -> None:
    own, parent = socket.socketpair()
    with own:
        own.sendall(unread)
        parent.close()
        with pytest.raises(SystemExit) as ended:
            _receive_start(own, FrameDecoder())
    assert ended.value.code == 0
