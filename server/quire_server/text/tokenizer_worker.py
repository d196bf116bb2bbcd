"""The tokenizer process: very long texts to ids and back; pieces of bytes in, pieces of bytes out.

Promises: it dies when a text takes too much memory or CPU time, or when its parent is gone; the memory of a text is
returned to the system before the next one. `tokenizer_process` starts it by file name.

A message consists of pieces, each after its length (4 bytes, little-endian), and an empty piece at its end. The first
piece of a question is one of the letters below; the others together are a text in UTF-8, or ids of 4 bytes each. The
first piece of an answer is `OK` or `FAILED`; then come ids or a text in UTF-8.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from tokenizers import Tokenizer

from quire_engine.plain_files import read_plain

ENCODE, ENCODE_WITH_SPECIAL, DECODE = b"e", b"s", b"d"
OK, FAILED = b"k", b"f"
PIECE_BYTES = 1 << 16
ID_TYPE = "I"
_NICENESS = 10  # so that running streams come first


def pieces(stream: BinaryIO) -> Iterator[bytes]:
    """The pieces of one message; EOFError if the peer has closed the socket."""
    while True:
        head = stream.read(4)
        if len(head) < 4:
            raise EOFError
        size = int.from_bytes(head, "little")
        if not size:
            return
        piece = stream.read(size)
        if len(piece) < size:
            raise EOFError
        yield piece


def answer(tokenizer: Tokenizer, question: bytes, content: bytes) -> bytes:
    """The ids of a text, or the text of ids."""
    if question == DECODE:
        ids = array(ID_TYPE)
        ids.frombytes(content)
        (text,) = tokenizer.decode_batch([ids.tolist()], skip_special_tokens=False)
        return str(text).encode()
    with_special = question == ENCODE_WITH_SPECIAL
    (encoding,) = tokenizer.encode_batch_fast([content.decode()], add_special_tokens=with_special)
    return array(ID_TYPE, encoding.ids).tobytes()


def _give_memory_back() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _limit(memory_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # not every system can bound address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # handlers and masks are inherited from the parent
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    os.nice(_NICENESS)


def main(file: str, seconds: float, memory_bytes: int) -> None:
    """Answer questions from standard input until it ends; a first answer without content reports readiness."""
    _limit(memory_bytes)
    source, sink = sys.stdin.buffer, sys.stdout.buffer

    def tell(outcome: bytes, content: bytes = b"") -> None:
        for piece in (outcome, *(content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))):
            sink.write(len(piece).to_bytes(4, "little") + piece)
        sink.write(bytes(4))
        sink.flush()

    tokenizer = Tokenizer.from_buffer(read_plain(file))
    tokenizer.no_truncation()  # as in the parent
    tokenizer.no_padding()
    tell(OK)
    while True:
        try:
            question, *content = pieces(source)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            outcome, result = OK, answer(tokenizer, question, b"".join(content))
        except Exception:  # MemoryError included: its memory is free by now
            outcome, result = FAILED, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        tell(outcome, result)
        del content, result
        _give_memory_back()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
