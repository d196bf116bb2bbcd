"""How long one call takes on the device, without what the host takes to issue it.

Promises: on a GPU the calls are replayed as one graph, so that gaps between launches from Python do not count; what
cannot be captured is timed with them and says so.
Must not know: what is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from quire_engine.tools.gpu_limits import seconds_of

_log = logging.getLogger(__name__)


class CallTime(NamedTuple):
    seconds: float  # of one call
    replayed: bool  # as a graph; else gaps between launches count


def time_calls(work: Callable[[int], object], device: torch.device, *, calls: int, repeat: int) -> CallTime:
    """The best of `repeat` runs of work(0), ..., work(calls - 1), divided by their number.

    Each call should take operands of its own, of more bytes together than the caches hold.
    """

    def every() -> None:
        for i in range(calls):
            work(i)

    graph = _captured(every, device) if device.type == "cuda" else None
    run = every if graph is None else graph.replay
    return CallTime(seconds_of(run, device, repeat=repeat, warm_up=1) / calls, graph is not None)


def _captured(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph | None:
    """None for what cannot be captured, as the reference's attention, which waits for the device."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()  # kernels are compiled, and libraries made ready, before the capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            work()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        _log.warning("timed launch by launch: %s", str(error).splitlines()[0])
        torch.cuda.synchronize(device)
        return None
    return graph
