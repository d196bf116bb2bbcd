"""Which run of many failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(seed: int) -> Iterator[None]:
    """What fails here is shown with its seed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
