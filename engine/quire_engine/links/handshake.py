"""The handshake of a front and a node, or of two engines that pass KV blocks on: challenges, and proofs by one key.

Three messages of fixed sizes: the node's challenge, the front's challenge and proof, the node's proof, both of which
cover both challenges. Of two engines the one that is connected to has the node's part. Promises:
nothing is decoded; proofs are compared in constant time; a proof is good for one connection, since it covers both
challenges and, with TLS, both certificates. Must not know: sockets.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from hashlib import sha256

from quire_engine.contract.errors import QuireError

VERSION = 1  # of the handshake and of the frames after it; peers of unlike versions do not speak
_MAGIC = b"QUIRE/EN"
_NONCE_BYTES = 32
_HEAD = struct.Struct(f">8sH{_NONCE_BYTES}s")
PROOF_BYTES = sha256().digest_size
CHALLENGE_BYTES = _HEAD.size
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
_FRONT, _NODE, _SESSION = b"front", b"node ", b"bytes"  # so that a proof of one side is none of the other


class Refused(QuireError):
    """The peer is not let in, or does not let this side in; the text says why."""


def binding(node_certificate: bytes, front_certificate: bytes, purpose: bytes = b"") -> bytes:
    """The part of a proof that stands for the connection: both certificates in DER; empty without TLS.

    `purpose`: of the connection, so that a proof for one is none for another.
    """
    return sha256(node_certificate).digest() + sha256(front_certificate).digest() + purpose


class NodeHandshake:
    """The node's side of one handshake. An empty `key` proves nothing: for connections from this machine alone."""

    def __init__(self, key: bytes, bound_to: bytes) -> None:
        """`bound_to`: see `binding`."""
        self._key, self._bound_to = key, bound_to
        self.challenge = _HEAD.pack(_MAGIC, VERSION, secrets.token_bytes(_NONCE_BYTES))
        self._theirs = b""

    def answer(self, message: bytes) -> bytes:
        """The node's proof, for a front's ANSWER_BYTES. Raises Refused."""
        theirs, proof = message[:CHALLENGE_BYTES], message[CHALLENGE_BYTES:]
        _check_head(theirs, "no front of Quire speaks there")
        if not hmac.compare_digest(proof, _proof(self._key, _FRONT, self.challenge, theirs, self._bound_to)):
            raise Refused("it does not have the cluster's key")
        self._theirs = theirs
        return _proof(self._key, _NODE, self.challenge, theirs, self._bound_to)

    def session_key(self) -> bytes:
        """A key for digests on this connection alone; both sides have the same, once the handshake is through."""
        return _proof(self._key, _SESSION, self.challenge, self._theirs, self._bound_to)


class FrontHandshake:
    """The front's side of one handshake."""

    def __init__(self, key: bytes, bound_to: bytes) -> None:
        """`bound_to`: see `binding`."""
        self._key, self._bound_to = key, bound_to
        self._challenge = _HEAD.pack(_MAGIC, VERSION, secrets.token_bytes(_NONCE_BYTES))
        self._theirs = b""

    def answer(self, challenge: bytes) -> bytes:
        """The front's challenge and proof, for a node's CHALLENGE_BYTES. Raises Refused."""
        _check_head(challenge, "no node of Quire answers there")
        self._theirs = challenge
        return self._challenge + _proof(self._key, _FRONT, challenge, self._challenge, self._bound_to)

    def check(self, proof: bytes) -> None:
        """Check the node's PROOF_BYTES. Raises Refused."""
        if not hmac.compare_digest(proof, _proof(self._key, _NODE, self._theirs, self._challenge, self._bound_to)):
            raise Refused("it does not have the cluster's key")

    def session_key(self) -> bytes:
        """Return the key of the session, the same as `NodeHandshake.session_key`."""
        return _proof(self._key, _SESSION, self._theirs, self._challenge, self._bound_to)


def _check_head(challenge: bytes, otherwise: str) -> None:
    magic, version, _ = _HEAD.unpack(challenge)
    if magic != _MAGIC:
        raise Refused(otherwise)
    if version != VERSION:
        raise Refused(f"it speaks version {version} of the protocol, this one version {VERSION}")


def _proof(key: bytes, side: bytes, of_node: bytes, of_front: bytes, bound_to: bytes) -> bytes:
    return hmac.digest(key, side + of_node + of_front + bound_to, "sha256")
