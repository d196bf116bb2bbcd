"""Loads a model: weights are mapped from the previous engine, read from a file of packed weights, or packed.

Promises: the same bits each way; mapped or read weights are those of the present checkpoint; packed weights that cannot
be used cost a log line and the time to pack again. Must not know: requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.checkpoint import StoredTensors
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.matrix_parts import WeightSource
from quire_engine.execution.models.served import Parts, ServedModel, SourceOf, Wanted
from quire_engine.execution.models.weights import (
    CheckpointSource,
    ImageSource,
    assemble,
    checked_checkpoint,
    decoder_of,
    most_image_bytes,
)
from quire_engine.execution.packed.folder import FileWriter, PackedFolder, Refused, open_folder, read_image, say
from quire_engine.execution.packed.image import BadHeader, Image, ImageWriter, is_sealed, new_memory, open_image
from quire_engine.execution.progress import Tell, tell_nobody
from quire_kernels.packed_form import PackedForm

# Weights that pack in about a second are not worth a file.
LEAST_BYTES = 32 << 20

_CPU = torch.device("cpu")


def parts_of(wanted: Wanted) -> Parts:
    """How a model is put together."""
    if isinstance(wanted.model, ModelConfig):
        return NativeParts(wanted, wanted.model)
    # Imported here: transformers takes seconds to import, and most models do without.
    from quire_engine.execution.models.fallback.parts import FallbackParts  # noqa: PLC0415

    return FallbackParts(wanted)


class NativeParts:
    """See `Parts`: an entry of ours."""

    name = ""

    def __init__(self, wanted: Wanted, model: ModelConfig) -> None:
        self._wanted, self._model = wanted, model

    def check(self) -> None:
        """The entry is the proof."""

    def most_image_bytes(self, form: PackedForm) -> int:
        return most_image_bytes(self._model, form, self._wanted.dtype.itemsize)

    def opened(self) -> AbstractContextManager[StoredTensors]:
        return checked_checkpoint(self._wanted.path, self._model)

    def assemble(self, source_of: SourceOf, *, device: torch.device, max_model_len: int) -> ServedModel:
        source = source_of(self._wanted.dtype)
        weights = assemble(
            source,
            self._model,
            self._wanted.kernels,
            layout=self._wanted.layout,
            device=device,
            max_model_len=max_model_len,
            rank=self._wanted.rank,
        )
        return decoder_of(weights, self._model, self._wanted.kernels)


class FromCheckpoint:
    """See `SourceOf`: files, perhaps on the way into an image."""

    def __init__(self, checkpoint: StoredTensors, wanted: Wanted, tell: Tell, image: ImageWriter | None = None) -> None:
        self._checkpoint, self._wanted, self._tell, self._image = checkpoint, wanted, tell, image
        self._sources: dict[torch.dtype, CheckpointSource] = {}

    def __call__(self, dtype: torch.dtype) -> WeightSource:
        if dtype not in self._sources:
            wanted = self._wanted
            self._sources[dtype] = CheckpointSource(
                self._checkpoint,
                wanted.kernels,
                dtype,
                wanted.device,
                tell=self._tell if dtype is wanted.dtype else tell_nobody,
                image=self._image,
                threads=wanted.threads,
            )
        return self._sources[dtype]

    def has(self, name: str) -> bool:
        return name in self._checkpoint


class FromImage:
    """See `SourceOf`: an image."""

    def __init__(self, image: Image, form: PackedForm) -> None:
        self._image, self._form = image, form

    def __call__(self, dtype: torch.dtype) -> WeightSource:
        return ImageSource(self._image, self._form, dtype)

    def has(self, name: str) -> bool:
        return name in self._image.header.tensors


class Loading:
    """Loads one model. `held_bytes` of its weights are in memory already, left by the previous engine."""

    def __init__(self, wanted: Wanted, memory_fd: int | None, tell: Tell) -> None:
        """`memory_fd`: a memfd that outlives this process; empty, or with the previous engine's weights."""
        self._wanted, self._tell = wanted, tell
        self._form, self._parts = wanted.kernels.packed_form, parts_of(wanted)
        if self._form is not None and self._parts.most_image_bytes(self._form) is None:
            self._form = None
        self._key = "" if self._form is None else wanted.key(self._form, self._parts.name)
        self._fd = memory_fd
        self._image: Image | None = None
        if memory_fd is not None and self._form is not None:
            self._image = open_image(memory_fd, self._key)
            if self._image is None and is_sealed(memory_fd):
                self._fd = None  # sealed with other weights: it cannot be filled again
        self._writer: FileWriter | None = None
        self._file: Path | None = None  # the file that was read

    @property
    def held_bytes(self) -> int:
        return 0 if self._image is None else self._image.num_bytes

    def share(self) -> int:
        """The descriptor of the file of memory that the weights will be in, for other processes to map."""
        if self._fd is None:
            self._fd = new_memory()
        return self._fd

    def load(self, max_model_len: int, *, keep_any: bool = False) -> ServedModel:
        """The model. With `keep_any` even small weights are kept in a file. Raises ModelLoadError."""
        self._parts.check()
        asked, form = self._wanted.asked, self._form
        if form is None or (self._fd is None and not asked.packed_cache):
            return self._load_plainly(max_model_len)
        folder = self._folder(form, 0 if keep_any else LEAST_BYTES)
        if self._fd is None and folder is None:
            return self._load_plainly(max_model_len)
        try:
            fd = new_memory() if self._fd is None else self._fd
        except (OSError, AttributeError):  # a system without files of memory
            return self._load_plainly(max_model_len)
        try:
            return self._load_image(fd, form, folder, max_model_len)
        finally:
            if fd != self._fd:
                os.close(fd)  # what is mapped stays

    def file(self) -> Path | None:
        """Return the file that keeps the weights for the next start, once it does; None where none does."""
        return self._file if self._writer is None else self._writer.wait()

    def _folder(self, form: PackedForm, least_bytes: int) -> PackedFolder | None:
        asked = self._wanted.asked
        if not asked.packed_cache or self._most_bytes(form) < least_bytes:
            return None
        return open_folder(asked.packed_cache_dir, asked.packed_cache_size)

    def _most_bytes(self, form: PackedForm) -> int:
        return self._parts.most_image_bytes(form) or 0

    def _load_plainly(self, max_model_len: int) -> ServedModel:
        """Load into memory of this process alone."""
        wanted, parts = self._wanted, self._parts
        with parts.opened() as checkpoint:
            source_of = FromCheckpoint(checkpoint, wanted, self._tell)
            return parts.assemble(source_of, device=wanted.device, max_model_len=max_model_len)

    def _load_image(self, fd: int, form: PackedForm, folder: PackedFolder | None, max_model_len: int) -> ServedModel:
        image, wanted = self._image, self._wanted
        if image is None and folder is not None:
            image = self._read(folder, fd, form)
        if image is None:
            image = self._pack(fd, form, folder)
        elif folder is not None and not folder.file(self._key).exists() and image.header.checksums:
            self._writer = FileWriter(folder, self._key, fd, image.num_bytes)  # the engine before did not get so far
            self._writer.finish(image.num_bytes)
        self._tell("mapping weights", image.num_bytes, image.num_bytes)
        try:
            return self._parts.assemble(FromImage(image, form), device=_CPU, max_model_len=max_model_len)
        except (BadHeader, KeyError, ValueError) as error:
            # Its checksums passed when it was read, so the image itself is wrong.
            with suppress(OSError):
                if folder is not None:
                    folder.file(self._key).unlink()
            raise ModelLoadError(f"{wanted.path}: its packed weights cannot be used: {error}; start again") from None

    def _read(self, folder: PackedFolder, fd: int, form: PackedForm) -> Image | None:
        """Read the file of an earlier start. None: there is none that can be used."""
        path = folder.file(self._key)
        try:
            read_image(path, self._key, fd, checksum=form.checksum, threads=self._wanted.threads, tell=self._tell)
        except FileNotFoundError:
            return None
        except Refused as error:
            say(f"the packed weights in {path} are not used, but packed again: {error}")
            with suppress(OSError):
                path.unlink()
            return None
        self._file = path
        return open_image(fd, self._key)

    def _pack(self, fd: int, form: PackedForm, folder: PackedFolder | None) -> Image:
        wanted = self._wanted
        most_bytes = self._most_bytes(form)
        on_filled: Callable[[int], None] = lambda _: None  # noqa: E731
        if folder is not None:
            self._writer = FileWriter(folder, self._key, fd, most_bytes)
            on_filled = self._writer.advance
        writer = ImageWriter(fd, self._key, most_bytes, on_filled)
        try:
            with self._parts.opened() as checkpoint:
                source_of = FromCheckpoint(checkpoint, wanted, self._tell, writer)
                self._parts.assemble(source_of, device=_CPU, max_model_len=1)
            if wanted.key(form, self._parts.name) != self._key:
                raise ModelLoadError(f"{wanted.path}: its files changed while they were read; start again")
            header = writer.seal(form.checksum if folder is not None else None, wanted.threads)
        except BaseException:
            writer.close()
            if self._writer is not None:
                self._writer.stop()
            raise
        if self._writer is not None:
            self._writer.finish(header.num_bytes)
        return Image(fd, header)
