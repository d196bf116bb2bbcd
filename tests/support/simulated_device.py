"""A GPU that is not there: torch's operations on CPU tensors, queued and done as late as a wait allows.

Promises: inside `work` nothing is computed when it is issued; copies read and write host buffers only when an event
behind them is waited for; memory holds poison until it is written, a graph's own again before every replay; a graph
does what was captured, with the host's values of that time. Everything that would make the host wait is counted or,
inside a capture, refused. Must not know: the runner, kernels, models.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from quire_engine.execution.gpu.device import HostBuffer
from support.simulated_lane import LaneEvent, SimulatedEvent, SimulatedGraph, SimulatedLane

Work = Callable[[], None]

_POISON = {torch.bool: True, torch.uint8: 0xA5, torch.int32: 0x25A5A5A5, torch.int64: 0x25A5A5A5A5A5A5A5}
# Operations whose results, or the sizes of them, the host must know. Others reach torch as one of these.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
_KNOWN: dict[Any, Any] = {}  # results of operations without their data, by operation and arguments
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__}


class SimulatedDevice:
    """See `Device`. `sent`, `fetched`: copies; `waits`: what the host had to wait for; `pageable`: copies that wait."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent = self.fetched = self.released = self.captures = self.replays = 0
        self.waits: list[str] = []
        self.pageable = 0
        self.out_of_memory: Callable[[], None] = lambda: None  # may raise where a capture begins
        self._queue: deque[Work] = deque()
        self._issued = self._done = 0
        self._capturing: _Capture | None = None
        self._graph_memory: dict[int, Tensor] = {}  # by address
        self._host: dict[int, HostBuffer] = {}  # by address
        self.executing = False
        self.lanes: list[SimulatedLane] = []
        self.eager_lanes = False  # what is issued to a lane is done as soon as its events allow; else as late

    @contextmanager
    def work(self) -> Iterator[None]:
        # With more, the reference computes wide products in threads of its own, whose operations no mode sees.
        with _one_thread(), _Calls(self), _Operations(self):
            yield

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        self.executing, before = True, self.executing
        try:
            buffer = HostBuffer(torch.full((num_bytes,), 0xA5, dtype=torch.uint8))
        finally:
            self.executing = before
        return self._host.setdefault(_address(buffer.tensor), buffer)

    def send(self, source: Tensor, target: Tensor) -> None:
        self.check_host(source)
        self.sent += 1
        self.issue(lambda: target.copy_(source))

    def fetch(self, source: Tensor, target: Tensor) -> None:
        self.check_host(target)
        self.fetched += 1
        self.execute(lambda: target.fill_(0x5A))  # whatever the host reads before it waits
        self.issue(lambda: target.copy_(source))

    def record(self) -> SimulatedEvent:
        assert self._capturing is None, "an event inside a capture"
        return SimulatedEvent(self, self._issued)

    def lane(self) -> SimulatedLane:
        self.lanes.append(SimulatedLane(self))
        return self.lanes[-1]

    def follow(self, event: LaneEvent) -> None:
        self.issue(event.pass_by)

    def capture(self, body: Callable[[], None]) -> SimulatedGraph:
        self.out_of_memory()
        assert self._capturing is None
        self._capturing = capture = _Capture()
        try:
            body()
        finally:
            self._capturing = None
        self.captures += 1
        self._graph_memory |= capture.memory
        return SimulatedGraph(self, capture)

    def borrow(self, tensor: Tensor) -> Tensor:
        assert _address(tensor) in self._graph_memory, "not of a capture"
        return _same_memory(tensor)

    def release(self) -> None:
        self.released += 1

    # What the modes, events and graphs below ask for.

    def issue(self, work: Work) -> None:
        assert self._capturing is None, "a copy inside a capture"
        self._queue.append(work)
        self._issued += 1

    def run_until(self, end: int, reason: str) -> None:
        """Do what was issued up to a point: the host waits if anything of it is left to do."""
        if self._done >= end:
            return
        assert self._capturing is None, f"{reason} inside a capture"
        self.waits.append(reason)
        self.do_until(end)

    def finish(self, reason: str = "synchronize") -> None:
        self.run_until(self._issued, reason)
        for lane in self.lanes:
            lane.run_until(lane.issued)

    def do_until(self, end: int) -> None:
        """As a lane waits for the work, which makes no host wait."""
        while self._done < end:
            self._done += 1
            self.execute(self._queue.popleft())

    def execute(self, work: Work) -> None:
        before, self.executing = self.executing, True
        try:
            with torch.inference_mode():
                work()
        finally:
            self.executing = before

    def wait_for_data(self, reason: str) -> None:
        assert self._capturing is None, f"{reason} inside a capture"
        if self._done >= self._issued:
            self.waits.append(reason)  # a device is never known to be done without asking
        self.finish(reason)

    def copy_pageable(self) -> None:
        assert self._capturing is None, "a copy from pageable memory inside a capture"
        self.pageable += 1

    def keep(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Queue an operation, or keep it for the graph that is being captured."""
        if self._capturing is not None:
            self._capturing.keep(function, args, kwargs, results)
        else:
            self.issue(lambda: _compute(function, args, kwargs, results))

    def allocated(self, tensor: Tensor) -> Tensor:
        self.execute(lambda: poison(tensor))
        if self._capturing is not None:
            self._capturing.memory[_address(tensor)] = tensor
        return tensor

    def poison_graph_memory(self) -> None:
        """All graphs share their memory: what one left is gone when another one, or itself, is replayed."""
        memory = list(self._graph_memory.values())

        def work() -> None:
            for tensor in memory:
                poison(tensor)

        self.issue(work)

    def is_host(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._host

    def check_host(self, tensor: Tensor) -> None:
        assert self.is_host(tensor), "a copy from or to memory that is not pinned"


class _Capture:
    """A graph in the making. It does not keep alive what it did not allocate, as a graph does not."""

    def __init__(self) -> None:
        self.operations: list[Work] = []
        self.memory: dict[int, Tensor] = {}  # by address
        self.storages: dict[int, StorageWeakRef] = {}  # of others, by address

    def keep(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        args, kwargs, results = tree_map(self._borrowed, (args, kwargs, results))
        self.operations.append(lambda: _compute(function, args, kwargs, results))

    def _borrowed(self, value: Any) -> Any:
        """The same memory, of whoever it is then."""
        if not isinstance(value, Tensor) or not value.untyped_storage().nbytes():
            return value
        address = _address(value)
        if address in self.memory:
            return value
        self.storages.setdefault(address, StorageWeakRef(value.untyped_storage()))
        return _same_memory(value)


class _Operations(TorchDispatchMode):
    """Queues every operation. Sizes and types of results come from the same operation on tensors without data."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(  # noqa: PLR0911 - a case a kind of operation
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, function.name().removeprefix("aten::")
        if device.executing:
            return function(*args, **kwargs)
        with self:
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if name.startswith("lift_fresh"):
            device.copy_pageable()
            return function(*args, **kwargs)
        if name.split(".")[0] in _READS or _has_mask(name, args):
            device.wait_for_data(name)
            return function(*args, **kwargs)
        schema = function._schema
        if schema.is_mutable:
            self._check(args, kwargs, name)
            device.keep(function, args, kwargs, None)
            return _written(schema, args, kwargs)
        if any(result.alias_info is not None for result in schema.returns):
            return function(*args, **kwargs)  # a view: no work
        self._check(args, kwargs, name)
        metas = _results(function, args, kwargs)
        results = tree_map(lambda meta: device.allocated(_like(meta)) if isinstance(meta, Tensor) else meta, metas)
        if not name.split(".")[0].startswith(("empty", "new_empty")):
            device.keep(function, args, kwargs, results)
        return results

    def _check(self, args: Any, kwargs: Any, name: str) -> None:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        assert not any(map(self._device.is_host, tensors)), f"{name} works on a host buffer"


class _Calls(TorchFunctionMode):
    """Sees what reads a tensor's data without an operation: on a CPU these need none."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READING_METHODS and not self._device.executing:
            self._device.wait_for_data(function.__name__)
            before, self._device.executing = self._device.executing, True
            try:
                return function(*args, **(kwargs or {}))
            finally:
                self._device.executing = before
        return function(*args, **(kwargs or {}))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same_memory(tensor: Tensor) -> Tensor:
    """The tensor, but for keeping its memory."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    memory = (ctypes.c_char * (storage.nbytes() // size * size)).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _address(tensor: Tensor) -> int:
    """Return where the memory begins that the tensor, perhaps with others, is in."""
    return tensor.untyped_storage().data_ptr()


def poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else _POISON[tensor.dtype])


def _compute(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    computed = function(*args, **kwargs)
    if results is None:
        return
    for result, value in zip(tree_leaves(results), tree_leaves(computed), strict=True):
        if isinstance(result, Tensor):
            result.copy_(value)


def _results(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation's results without their data, remembered: most steps have the shapes of earlier ones."""
    key = (function, _likeness(args), _likeness(tuple(kwargs.items())))
    if key not in _KNOWN:
        _KNOWN[key] = function(*tree_map(_without_data, args), **tree_map(_without_data, kwargs))
    return _KNOWN[key]


def _likeness(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_likeness, value))
    return type(value), value


def _without_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _like(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _written(schema: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operation in place returns."""
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written = [named[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _has_mask(name: str, args: Any) -> bool:
    """Whether an index is a mask, which has as many results as it has True."""
    if not name.startswith(("index.Tensor", "index_put")):
        return False
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
