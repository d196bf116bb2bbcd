"""The progress bar of a run, on stderr.

Promises: one step for each finished prompt, from any thread; stdout stays the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.outputs import RequestOutput


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[RequestOutput | None], None]]:
    """Yields a function to call with each finished prompt, with its output if tokens were generated."""
    if not shown:
        yield lambda _: None
        return
    # Imported here, since a run without a bar does not need it.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    bar = Progress(
        TextColumn("Processed prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        console=Console(stderr=True),
    )
    task = bar.add_task("", total=total, tokens=0)
    tokens = 0

    def finished(output: RequestOutput | None) -> None:
        nonlocal tokens
        if output is not None:
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
        bar.update(task, advance=1, tokens=tokens)

    with bar:
        yield finished
