"""Where a decoder's tensors and matrices come from: the checkpoint's files, or an image of packed weights.

Promises: from either one the same bits; a value that is not finite is a ModelLoadError that names tensor and file;
beside what is kept, one matrix at a time is in memory. Must not know: which layer is made of what.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.execution.models.checkpoint import Checkpoint
from quire_engine.execution.packed.image import Image, ImageWriter
from quire_engine.execution.progress import Progress, Tell
from quire_kernels.kernel_set import KernelSet, LinearWeight
from quire_kernels.packed_form import PackedForm

_VALUES_AT_ONCE = 4 << 20  # that one thread converts


class WeightSource(Protocol):
    """Gives each tensor once, by its name in the checkpoint, and each matrix once, by its place in the decoder."""

    def tensor(self, name: str) -> Tensor: ...

    def matrix(self, place: str, weights: Sequence[str], biases: Sequence[str]) -> LinearWeight:
        """One projection made of the rows of several."""
        ...

    def gate_up(self, place: str, gate: str, up: str, biases: Sequence[str]) -> LinearWeight: ...

    def head(self, place: str, name: str, embedding: Tensor) -> LinearWeight:
        """The last projection; `embedding` is what `tensor` gave for it where both are one."""
        ...


class CheckpointSource:
    """Reads, converts, checks and packs; with an image, into that."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tell: Tell,
        image: ImageWriter | None = None,
        threads: int = 1,
    ) -> None:
        """`image`: for kernels that have a packed form."""
        self._checkpoint = checkpoint
        self._form = kernels.packed_form
        self._dtype, self._device = dtype, device
        self._image = image
        self._threads = threads
        self._pack_linear, self._pack_gate_up = kernels.pack_linear, kernels.pack_gate_up
        if image is not None and self._form is not None:
            self._pack_linear, self._pack_gate_up = self._form.packer(image.allocate)
        phase = "reading weights" if self._form is None else "packing weights"
        self._progress = Progress(phase, checkpoint.num_bytes, tell)

    def tensor(self, name: str) -> Tensor:
        stored = self._checkpoint.tensor(name)
        if self._image is None:
            # Always a copy: the file may be replaced while we serve, and its mapping would follow.
            value = stored.to(device=self._device, dtype=self._dtype, copy=True)
        else:
            value = self._image.place(name, tuple(stored.shape), self._dtype)
            self._convert([stored], value)
        self._check(name, value)
        self._done(name)
        return value

    def matrix(self, place: str, weights: Sequence[str], biases: Sequence[str]) -> LinearWeight:
        packed = self._pack_linear(self._rows(weights), self._bias(biases))
        return self._packed(place, packed, [*weights, *biases])

    def gate_up(self, place: str, gate: str, up: str, biases: Sequence[str]) -> LinearWeight:
        packed = self._pack_gate_up(self._rows([gate]), self._rows([up]), self._bias(biases))
        return self._packed(place, packed, [gate, up, *biases])

    def head(self, place: str, name: str, embedding: Tensor) -> LinearWeight:
        if self._checkpoint.is_done(name):
            return self._packed(place, self._pack_linear(embedding, None), [])
        return self.matrix(place, [name], [])

    def _packed(self, place: str, packed: LinearWeight, names: Sequence[str]) -> LinearWeight:
        if self._image is not None and self._form is not None:
            self._image.put_matrix(place, self._form.facts(packed), self._form.parts(packed))
        for name in names:
            self._done(name)
        return packed

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        return self._rows(names, may_be_kept=True) if names else None

    def _rows(self, names: Sequence[str], *, may_be_kept: bool = False) -> Tensor:
        """The rows of one tensor or of several, one below the other."""
        stored = [self._checkpoint.tensor(name) for name in names]
        packs = self._form is not None and not may_be_kept
        if packs and len(stored) == 1 and stored[0].dtype is self._dtype:
            rows = stored[0]  # packing reads it and keeps nothing: no need for a copy
        elif self._device.type == "cpu":
            rows = torch.empty(sum(map(len, stored)), *stored[0].shape[1:], dtype=self._dtype)
            self._convert(stored, rows)
        else:
            moved = [part.to(device=self._device, dtype=self._dtype, copy=True) for part in stored]
            rows = torch.cat(moved) if len(moved) > 1 else moved[0]
        for name, part in zip(names, torch.split(rows, [len(part) for part in stored]), strict=True):
            self._check(name, part)
        return rows

    def _convert(self, stored: Sequence[Tensor], into: Tensor) -> None:
        """One below the other, by several threads: of torch's own there are few where kernels have theirs."""
        pieces: list[tuple[Tensor, Tensor]] = []
        step = max(1, _VALUES_AT_ONCE // max(1, into[0].numel()))
        at = 0
        for part in stored:
            for piece in torch.split(part, step):
                pieces.append((into[at : at + len(piece)], piece))
                at += len(piece)
        if len(pieces) == 1:
            into.copy_(stored[0])
            return

        def copy(pair: tuple[Tensor, Tensor]) -> None:
            with torch.inference_mode(into.is_inference()):  # which is a thread's own
                pair[0].copy_(pair[1])

        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(copy, pieces):
                pass

    def _check(self, name: str, value: Tensor) -> None:
        if self._form is not None:
            finite = self._form.all_finite(value)
        else:
            finite = all(bool(torch.isfinite(bound)) for bound in torch.aminmax(value))  # NaN is both bounds
        if not finite:
            dtype = str(self._dtype).removeprefix("torch.")
            raise self._checkpoint.error(name, f"holds values that are not finite numbers (in {dtype})")

    def _done(self, name: str) -> None:
        self._progress.add(self._checkpoint.done(name))
        if self._image is not None:
            self._image.tell_used()


class ImageSource:
    """Maps what was packed before."""

    def __init__(self, image: Image, form: PackedForm, dtype: torch.dtype) -> None:
        self._image, self._form, self._dtype = image, form, dtype

    def tensor(self, name: str) -> Tensor:
        return self._image.tensor(name, self._dtype)

    def matrix(self, place: str, weights: Sequence[str], biases: Sequence[str]) -> LinearWeight:
        del weights, biases
        return self._form.restore(*self._image.matrix(place))

    def gate_up(self, place: str, gate: str, up: str, biases: Sequence[str]) -> LinearWeight:
        del gate, up
        return self.matrix(place, (), biases)

    def head(self, place: str, name: str, embedding: Tensor) -> LinearWeight:
        del embedding
        return self.matrix(place, (name,), ())
