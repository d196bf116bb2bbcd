"""Commands of rank 0's runner to the other ranks of a model: each piece of work, which all of them issue to a device.

Promises: every rank issues the same exchanges in the same order. Rank 0 alone chooses tokens; the ids reach the others
from device to device. An error inside a body ends the ranks, one between bodies harms no other request. Must not know:
processes, sampling.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_engine.execution.gpu.device import Device, Packed
from quire_engine.execution.gpu.forward import Model
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket
from quire_engine.execution.gpu.resident import Resident, RunnerLimits
from quire_engine.execution.kv.kv_storage import KVBlocks, Pairs
from quire_kernels.ranks import DeviceCollective, computed_by_all

Body = AbstractContextManager[None]
_LENGTH = 8  # bytes of a number
END = "end"


class RankCommands(Protocol):
    """Each call is for work that follows it, in the order of the calls. Around a body all ranks compute together."""

    def sent(self, sections: Mapping[str, array[int]]) -> None:
        """Sections of a step, or changes of tables."""
        ...

    def hidden(self, query_lens: Sequence[int], kv_lens: Sequence[int], counts: Sequence[int]) -> Body:
        """All layers of what was sent, as `Forward.hidden` has them."""
        ...

    def graph(self, bucket: Bucket | MixedBucket) -> Body:
        """A graph of what was sent, or what it is captured from."""
        ...

    def kept(self) -> None:
        """Keep only the hidden states of the rows in the section `logit_rows`."""
        ...

    def logits(self, rows: slice) -> Body:
        """The head, of some rows of the hidden states."""
        ...

    def tokens(self, region: int, ids: Tensor) -> None:
        """The ids that a step has left in a region, on the device: the next step finds them in every rank."""
        ...


class NoRanks:
    """See `RankCommands`: there are no others."""

    def sent(self, sections: Mapping[str, array[int]]) -> None:
        pass

    def hidden(self, query_lens: Sequence[int], kv_lens: Sequence[int], counts: Sequence[int]) -> Body:
        del query_lens, kv_lens, counts
        return nullcontext()

    def graph(self, bucket: Bucket | MixedBucket) -> Body:
        del bucket
        return nullcontext()

    def kept(self) -> None:
        pass

    def logits(self, rows: slice) -> Body:
        del rows
        return nullcontext()

    def tokens(self, region: int, ids: Tensor) -> None:
        pass


def encode(what: str, numbers: Sequence[Any] = (), sections: Mapping[str, array[int]] | None = None) -> bytes:
    """One piece of work: its name, its numbers and arrays by name."""
    arrays = sections or {}
    described = [[name, values.typecode, len(values)] for name, values in arrays.items()]
    head = json.dumps([what, numbers, described]).encode()
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(values.tobytes() for values in arrays.values())])


def decode(data: bytes) -> tuple[str, list[Any], dict[str, array[int]]]:
    """The name, numbers and arrays that `encode` was given."""
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    what, numbers, described = json.loads(data[_LENGTH:at])
    sections: dict[str, array[int]] = {}
    for name, typecode, count in described:
        sections[name] = array(typecode)
        end = at + count * sections[name].itemsize
        sections[name].frombytes(data[at:end])
        at = end
    return what, numbers, sections


class DeviceLeader:
    """See `RankCommands`: rank 0's side, if there are other ranks."""

    def __init__(self, collective: DeviceCollective, tell: Callable[[bytes], None]) -> None:
        """`tell`: gives all other ranks a message, in order; raises RankLost."""
        self._collective, self._tell = collective, tell

    def sent(self, sections: Mapping[str, array[int]]) -> None:
        self._tell(encode("sent", sections=sections))

    def hidden(self, query_lens: Sequence[int], kv_lens: Sequence[int], counts: Sequence[int]) -> Body:
        return self._with_others(encode("hidden", [list(query_lens), list(kv_lens), list(counts)]))

    def graph(self, bucket: Bucket | MixedBucket) -> Body:
        return self._with_others(encode("decodes" if isinstance(bucket, Bucket) else "mixed", list(bucket)))

    def kept(self) -> None:
        self._tell(encode("kept"))

    def logits(self, rows: slice) -> Body:
        return self._with_others(encode("logits", [rows.start, rows.stop]))

    def tokens(self, region: int, ids: Tensor) -> None:
        with self._with_others(encode("tokens", [region])):
            self._collective.share(ids)

    def copied(self, pairs: Pairs) -> None:
        """Blocks of the pool are about to be copied."""
        self._tell(encode("copied", [list(pair) for pair in pairs]))

    def end(self) -> None:
        """The others are needed no more."""
        self._tell(encode(END))

    @contextmanager
    def _with_others(self, message: bytes) -> Iterator[None]:
        with computed_by_all("what the others compute"):
            self._tell(message)
            yield


class DeviceFollower:
    """Another rank's side: issues what rank 0 tells. Owns what its device keeps between steps."""

    def __init__(
        self, model: Model, kv: KVBlocks, device: Device, limits: RunnerLimits, collective: DeviceCollective
    ) -> None:
        """`limits`: rank 0's."""
        self._model, self._kv, self._device, self._collective = model, kv, device, collective
        self._resident = Resident(model, kv.tensor, device, limits)
        self._packed: Packed | None = None
        self._hidden: Tensor | None = None

    def follow(self, receive: Callable[[], bytes]) -> None:
        """Do what comes until the end. Raises what `receive`, the model and the device raise."""
        while True:
            what, numbers, sections = decode(receive())
            if what == END:
                return
            with self._device.work(), torch.inference_mode():
                self._issue(what, numbers, sections)

    def _issue(self, what: str, numbers: list[Any], sections: Mapping[str, array[int]]) -> None:
        forward = self._resident.forward
        match what:
            case "sent":
                self._packed = self._resident.send(sections)
            case "hidden":
                self._hidden = forward.hidden(self._sections(), *numbers)
            case "mixed":
                mixed = MixedBucket(*numbers)
                self._hidden = self._resident.graphs.run(mixed, lambda: forward.mixed(self._sections(), *mixed))
            case "decodes":
                bucket = Bucket(*numbers)
                rows, context = bucket.num_rows, bucket.context
                self._resident.graphs.run(bucket, lambda: forward.decoded(self._sections(), rows, context))
            case "kept":
                self._hidden = self._rows().index_select(0, self._sections()["logit_rows"])
            case "logits":
                self._model.logits(self._rows()[slice(*numbers)])
            case "tokens":
                self._collective.share(self._resident.regions[numbers[0]].ids)
            case "copied":
                self._kv.copy_blocks([(source, target) for source, target in numbers])
            case _:
                raise ValueError(f"rank 0 tells of {what}, which no rank knows")

    def _sections(self) -> Packed:
        if self._packed is None:
            raise ValueError("a step is to be computed before anything was sent")
        return self._packed

    def _rows(self) -> Tensor:
        if self._hidden is None:
            raise ValueError("the head is to be computed before any layer")
        return self._hidden
