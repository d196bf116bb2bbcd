"""The child's side of a dialogue in lines of JSON: questions on stdin, replies on stdout.

Promises: only replies are written to stdout; the last reply of a refused question is `{"error": TEXT, "kind": "config"
| "model"}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quire_engine.contract.errors import ConfigError, QuireError
from quire_engine.machine import die_with_parent

DONE, FAILED, BAD_CONFIG = 0, 1, 2


def converse(answers: Callable[[Iterator[Any]], Iterable[object]]) -> int:
    """Write each reply that `answers` yields at once; return the process's exit code.

    A QuireError or a missing library ends the dialogue.
    """
    die_with_parent(os.getppid())  # a command that a signal ends at once leaves no tool behind
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies

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
