"""Builds and runs the project's image without a daemon: Debian's buildah, and a chroot in namespaces of its own.

Promises: the image runs as it declares, with a root that nobody can write to; what was made is removed with the folder.
Must not know: what is in the image, which tests there are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates"
_CERTIFICATES = "/etc/ssl/certs"
_ENTER = """
set -e
mount --bind "$0" "$0"
mount -o remount,bind,ro "$0"
mount -t proc proc "$0/proc"
mount -t tmpfs tmpfs "$0/tmp"
mount --rbind /dev "$0/dev"
exec "$@"
"""  # in a mount and a process namespace of its own: nothing of it is left


def why_not() -> str | None:
    """Why no image can be built here; None where one can."""
    if os.geteuid() != 0:
        return "images are built by root only: buildah's chroots and mounts need it"
    missing = [tool for tool in ("buildah", "unshare", "nsenter") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} here (Debian: apt-get install buildah)" if missing else None


class Images:
    """The images of one folder, which is buildah's whole world."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def buildah(self, *arguments: str | Path, timeout: float = 900.0) -> str:
        """Its output. AssertionError with the end of its complaint."""
        where = ["--root", self._folder / "store", "--runroot", self._folder / "run"]
        done = subprocess.run(
            ["buildah", *map(str, (*where, *arguments))],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"buildah {arguments[0]}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def base(self, default: str) -> str | None:
        """The image's own base where it can be had, else Debian with Python, made here; None: neither can be."""
        try:
            self.buildah("pull", default, timeout=300)
        except (AssertionError, subprocess.TimeoutExpired):
            return self._debian()
        return default

    def _debian(self) -> str | None:
        if shutil.which("debootstrap") is None:
            return None
        container = self.buildah("from", "scratch").strip()
        root = self.buildah("mount", container).strip()
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", SUITE, root],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode == 0:
            self.buildah("commit", "--quiet", container, "quire-test-base")
        self.buildah("rm", container)
        return "localhost/quire-test-base" if made.returncode == 0 else None

    def build(self, name: str, *, wheels: Path | None, **arguments: str) -> None:
        """The Dockerfile's last stage. `wheels`: see there; `arguments`: of the build, by name."""
        pip = self._folder / "pip.conf"
        pip.write_text(pip_configuration())
        words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        if wheels is not None:
            words += ["--build-context", f"wheels={wheels}"]
        self.buildah(
            # OCI's format has no health checks; buildah before 1.30 thinks base-${DEVICE} unused.
            *("build", "--format", "docker", "--skip-unused-stages=false", "--secret", f"id=pip,src={pip}"),
            *("--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro", *words, "--tag", name, ROOT),
        )

    def config(self, name: str) -> dict[str, Any]:
        """What the image declares: User, Env, Entrypoint, Healthcheck."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", name))["Docker"]["config"]
        return found

    def size(self, name: str) -> int:
        """Bytes."""
        (image,) = json.loads(self.buildah("images", "--json", name))
        number, unit = image["size"].split()
        return int(float(number) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[unit.upper()])

    @contextmanager
    def running(
        self, name: str, *arguments: str, entry: str | None = None, user: str | None = None
    ) -> Iterator[Container]:
        """The image's entry point, or another one, with these arguments; as the user it declares, or another one."""
        made = self.buildah("from", "--pull=never", name).strip()
        try:
            root = Path(self.buildah("mount", made).strip())
            config = self.config(name)
            words = [*([entry] if entry else config["Entrypoint"]), *arguments]
            container = Container(root, config, words, user)
            try:
                yield container
            finally:
                container.end()
        finally:
            self.buildah("rm", made)

    def close(self) -> None:
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        shutil.rmtree(self._folder)


class Container:
    """A running image. Ended by `Images.running`."""

    def __init__(self, root: Path, config: dict[str, Any], words: Sequence[str], user: str | None) -> None:
        self._root = root
        self._user = user or config["User"]
        self._variables = config["Env"]
        self._check = config["Healthcheck"]["Test"][1:]
        self._output = (root.parent / f"{root.name}.log").open("w+")
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, str(root)]
        self._process = subprocess.Popen(
            [*enter, *self._as_user(*words)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def _as_user(self, *words: str) -> list[str]:
        user = self._user if ":" in self._user else f"{self._user}:{self._user}"
        return ["env", "-i", *self._variables, "chroot", f"--userspec={user}", str(self._root), *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A further command in it, as `docker exec` would."""
        command = ["nsenter", "--mount", "--pid", "--target", str(self._first()), *self._as_user(*words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def healthy(self, seconds: float = 90.0) -> str:
        """What the declared health check says once it succeeds. AssertionError after `seconds` or at its end."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.run(*self._check)
            if found.returncode == 0:
                return found.stdout
            ended = self._process.poll() is not None or time.monotonic() > deadline
            assert not ended, found.stderr + self.output()
            time.sleep(0.5)

    def stop(self) -> int:
        """SIGTERM to the first process, as `docker stop` does; the exit code."""
        subprocess.run(["kill", "-TERM", str(self._first())], check=True)
        return self.wait()

    def wait(self) -> int:
        """Until it ends by itself; the exit code."""
        return self._process.wait(timeout=60)

    def output(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        Path(self._output.name).unlink()

    def _first(self) -> int:
        """Process 1 of the container, by the number it has outside."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + 10
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return int(found[0])


def pip_configuration() -> str:
    """What this machine's pip is told about indices, for the build's secret: folders of this machine are left out."""
    found = {}
    for key, value in _pip_settings():
        words = [word for word in value if not word.startswith(("file:", "/"))]
        if key in {"index-url", "extra-index-url", "trusted-host"} and words:
            found[key] = " ".join(words)
    found["cert"] = f"{_CERTIFICATES}/ca-certificates.crt"  # the build sees this machine's
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in found.items()), ""])


def folder_with_cpu_torch() -> Path | None:
    """The first of the folders that this machine's pip takes wheels from that has torch without CUDA."""
    folders = [Path(word) for key, value in _pip_settings() if key == "find-links" for word in value]
    return next((folder for folder in folders if any(folder.glob("torch-*+cpu-*.whl"))), None)


def _pip_settings() -> list[tuple[str, list[str]]]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    pattern = re.compile(r"(?:global|install|:env:)\.\.?([\w-]+)=.(.*).")
    matches = map(pattern.fullmatch, listed.stdout.splitlines())
    return [(match[1], match[2].replace("\\n", " ").split()) for match in matches if match]
