"""The child's side of a conversation in lines of JSON: questions on stdin, replies on stdout.

Promises: nothing else than replies is written to stdout; what is refused on purpose is the last reply, `{"error": TEXT,
"kind": "config" | "model"}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quire_engine.errors import ConfigError, QuireError

DONE, FAILED, BAD_CONFIG = 0, 1, 2


def converse(answers: Callable[[Iterator[Any]], Iterable[object]]) -> int:
    """Write what `answers` makes of the questions, each when it is there; the process's exit code.

    A QuireError ends the conversation, as does a library that is not installed.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the replies

    def write(value: object) -> None:
        replies.write(json.dumps(value) + "\n")

    try:
        for reply in answers(json.loads(line) for line in sys.stdin):
            write(reply)
    except ConfigError as error:
        write({"error": str(error), "kind": "config"})
        return BAD_CONFIG
    except (QuireError, ImportError) as error:
        write({"error": str(error), "kind": "model"})
        return FAILED
    return DONE
