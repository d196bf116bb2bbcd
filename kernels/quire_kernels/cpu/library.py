"""Finds, builds and loads the compiled C++ kernels.

Promises: a loaded library was built from the present sources, completely, and by this user; processes that start
together build once; a cache that cannot be written or trusted costs a build at every start. Must not know: tensors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from quire_kernels.cpu.compiler import (
    FLAGS,
    PATIENCE,
    TIMEOUT,
    Compiler,
    KernelBuildError,
    compile_library,
    find_compiler,
)
from quire_kernels.cpu.signatures import declare
from quire_kernels.cpu.variants import Variant, refusal
from quire_kernels.trusted_folder import UntrustedFolder, open_trusted, trusted

# Called with (compiled files, all files), so that a slow start does not look like a hang.
OnCompiled = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parents[1]
_PREBUILT = _PACKAGE / "prebuilt"
_DIGEST_BYTES = 32
_SECONDS_BETWEEN_LINES = 2.0


def load_library(
    variant: Variant,
    *,
    cache_dir: Path | None = None,
    extra_flags: Sequence[str] = (),
    on_compiled: OnCompiled | None = None,
) -> ctypes.CDLL:
    """The kernels for one variant.

    Built on first use and kept in `cache_dir` (default: ~/.cache/quire/kernels). `on_compiled` gets the number of
    compiled files. Raises KernelBuildError, or CompilationError for an error of the compiler.
    """
    if platform.system() != "Linux":
        raise KernelBuildError(f"the C++ kernels run on Linux, not on {platform.system()}")
    reason = refusal(variant)  # also requests the tile registers, without which their use would kill the process
    if reason is not None:
        raise KernelBuildError(f"the kernels for {variant.name} cannot run here: {reason}")
    flags = (*FLAGS, *variant.flags, *extra_flags)
    sources = _source_folder()
    key = _key(sources, flags)
    # Inside the installed package, which only its owner can write to.
    prebuilt = _PREBUILT / f"{variant.name}-{key}.so"
    if _is_complete(prebuilt):
        return _open(prebuilt)
    compiler = find_compiler()
    name = f"{variant.name}-{key}-{_digest(compiler.version.encode())[:8]}.so"

    def build(path: Path) -> None:
        _build(compiler, variant, sources, flags, path, on_compiled=on_compiled)

    cache = cache_dir
    try:
        cache = cache or default_cache()
        return _kept_or_built(trusted(cache) / name, build)
    except OSError as error:
        where = cache or "a home folder"
        _log.warning("compiled kernels cannot be kept in %s (%s): they are compiled at every start", where, error)
    try:
        with tempfile.TemporaryDirectory(prefix="quire-kernels-") as temporary:
            # Resolved, since a system's /tmp may be a link.
            path = trusted(Path(temporary).resolve()) / name
            build(path)
            return _kept(path)  # it stays mapped after the file is deleted
    except OSError as error:
        raise KernelBuildError(
            f"there is no place for the compiled kernels: {error}; set TMPDIR to a folder of yours with room"
        ) from error


def _kept_or_built(path: Path, build: Callable[[Path], None]) -> ctypes.CDLL:
    """The library at this path in a trusted folder, built if it cannot be loaded. Raises OSError."""
    with suppress(OSError):
        return _kept(path)
    with locked(path.with_suffix(".lock")):
        try:
            return _kept(path)  # another process may have built it meanwhile
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s; it is not loaded but compiled anew", error)
        build(path)
        return _kept(path)


def _kept(path: Path) -> ctypes.CDLL:
    """The library at this path, if it is complete and only this user can have made it.

    Raises FileNotFoundError if there is no complete one, UntrustedFolder.
    """
    descriptor = open_trusted(path)
    if not _is_complete(descriptor):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a whole library", str(path))
    # The checked file is the one that is loaded, even if the path has changed. The descriptor stays open: the loader
    # identifies libraries by name, so its number must not be reused.
    held = Path(f"/proc/self/fd/{descriptor}")
    return _open(held if held.exists() else path)


def build_prebuilt(variant: Variant, directory: Path | None = None, *, machine: str | None = None) -> Path:
    """Compile one variant into the package (or `directory`), where `load_library` finds it without a compiler.

    For another `machine`, by the name that platform.machine() has there, by a compiler for it. Raises KernelBuildError.
    """
    directory = directory or _PREBUILT
    flags = (*FLAGS, *variant.flags)
    sources = _source_folder()
    path = directory / f"{variant.name}-{_key(sources, flags, machine)}.so"
    if not _is_complete(path):
        directory.mkdir(parents=True, exist_ok=True)
        _build(find_compiler(machine), variant, sources, flags, path, timeout=PATIENCE)
    return path


def default_cache() -> Path:
    """The folder of this user's compiled kernels. Raises UntrustedFolder."""
    try:
        return Path.home() / ".cache" / "quire" / "kernels"
    except RuntimeError as error:  # neither HOME nor the user database has it
        raise UntrustedFolder("there is no home folder to keep compiled kernels in (set HOME)") from error


def common_flags() -> tuple[str, ...]:
    """The compiler flags of all variants."""
    return FLAGS


def _source_folder() -> Path:
    """The folder of the C++ sources: beside the package in a checkout, inside it when installed."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if next(folder.rglob("*.cpp"), None):
            return folder
    raise KernelBuildError(f"the C++ sources are missing from {_PACKAGE}")


def _key(sources: Path, flags: Sequence[str], machine: str | None = None) -> str:
    """Changes with the flags and any C++ file or its place in the folder; not with the folder's path."""
    content = hashlib.sha256("\0".join((machine or platform.machine(), *flags)).encode())
    for source in sorted([*sources.rglob("*.cpp"), *sources.rglob("*.h")]):
        content.update(f"\0{source.relative_to(sources)}\0".encode())
        content.update(source.read_bytes())
    return content.hexdigest()[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _build(
    compiler: Compiler,
    variant: Variant,
    sources: Path,
    flags: Sequence[str],
    path: Path,
    *,
    on_compiled: OnCompiled | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Compile into `path`. The library is followed by its digest, so that a partial file is recognised."""
    started = time.perf_counter()
    units = sorted(sources.rglob("*.cpp"))
    text = f"quire: compiling the CPU kernels ({variant.name}), {len(units)} files, with {compiler.path} ..."
    print(text, file=sys.stderr, flush=True)
    told = started

    def tell(num_done: int) -> None:
        """Print a line every other second, so that a first start does not look like a hang."""
        nonlocal told
        if on_compiled is not None:
            on_compiled(num_done, len(units))
        now = time.perf_counter()
        if now - told >= _SECONDS_BETWEEN_LINES and num_done < len(units):
            told = now
            print(
                f"quire: compiled {num_done} of {len(units)} files of the CPU kernels, {now - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".building-")
    os.close(descriptor)
    temporary = Path(name)
    try:
        jobs, flags = len(os.sched_getaffinity(0)), (*flags, f"-I{sources}")
        compile_library(compiler, units, flags, temporary, jobs=jobs, on_compiled=tell, timeout=timeout)
        content = temporary.read_bytes()
        with temporary.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
        temporary.chmod(0o644)
        temporary.rename(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    print(f"quire: compiled the CPU kernels in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def _is_complete(file: Path | int) -> bool:
    """`file`: a path, or a descriptor, which stays open."""
    try:
        with open(file, "rb", closefd=not isinstance(file, int)) as opened:
            content = opened.read()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        declare(library)
    except (OSError, AttributeError, ValueError) as error:
        raise KernelBuildError(f"the compiled kernels cannot be loaded: {error}") from error
    return library


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock between processes; the operating system releases it when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():  # another user could hold the lock for ever
            raise UntrustedFolder(f"{path} belongs to another user; remove it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
