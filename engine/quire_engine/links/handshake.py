"""The handshake of a front and a node, or of two engines that pass KV blocks on: each side greets, the node first.

TLS with certificates on both sides decides before it who may connect; without them anybody on this machine may.
Promises: nothing is decoded; another program, purpose or version is refused. Must not know: sockets.
"""

from __future__ import annotations

import secrets
import struct
from hashlib import sha256

from quire_engine.contract.errors import QuireError

VERSION = 3  # of the handshake and of the frames after it; peers of unlike versions do not speak
TO_NODE, TO_ENGINE = b"QUIRE/EN", b"QUIRE/KV"  # purposes of a connection: requests, KV blocks
_NONCE_BYTES = 32
_HELLO = struct.Struct(f">8sH{_NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size


class Refused(QuireError):
    """The peer is not let in, or does not let this side in; the text says why."""


def hello(purpose: bytes = TO_NODE) -> bytes:
    """Return a side's first message, which no other one equals."""
    return _HELLO.pack(purpose, VERSION, secrets.token_bytes(_NONCE_BYTES))


def check_hello(message: bytes, purpose: bytes = TO_NODE) -> None:
    """Check the other side's HELLO_BYTES. Raises Refused."""
    theirs, version, _ = _HELLO.unpack(message)
    if theirs != purpose:
        raise Refused("what speaks there is no node or front of Quire")
    if version != VERSION:
        raise Refused(f"it speaks version {version} of the protocol, this one version {VERSION}")


def session_key(of_node: bytes, of_front: bytes) -> bytes:
    """Return a key for digests on this connection alone, of both sides' messages, which TLS keeps from all others."""
    return sha256(of_node + of_front).digest()
