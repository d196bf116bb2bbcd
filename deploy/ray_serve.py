"""Quire on a Ray cluster: Ray places, restarts and scales the processes; tokens never pass through it.

    serve deploy configs/ray/two-replicas.yaml

A `QuireNode` is `quire engine` as a child of a Serve replica, a `QuireFront` is `quire serve` as one. Nodes announce
their addresses to a named actor under leases; fronts follow them through a file that `--engines file:PATH` reads again
and again. Clients speak to the fronts' own ports, or, with `proxied`, to Serve's proxy. Where Ray's head is lost,
fronts and nodes go on with the last addresses.

The module is imported by Ray alone: put its folder on the PYTHONPATH of the cluster, or name it as `working_dir`.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import aiohttp
import ray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from quire_engine.routing.fleet import Wanted, wanted_together

LEASE_SECONDS = 2.0  # of an address, renewed four times as often
_LISTENS = re.compile(r"a node listens on (\S+?)[,;]")
_READY = "the node is ready"
_SERVES = re.compile(r"running on (https?://\S+:\d+)")
_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 40  # of a child's log, to say why it ended
_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
    )
)


class Nodes(BaseModel):
    """The engines: so many, or between two numbers as the fronts want them."""

    model_config = ConfigDict(extra="forbid")

    number: int = Field(default=1, ge=1)
    most: int | None = None  # None: never more than `number`
    cpus: float = Field(default=1.0, ge=0)
    gpus: float = Field(default=0.0, ge=0)
    flags: list[str] = []  # of `quire engine`
    start_seconds: float = Field(default=1800.0, gt=0)  # in which the model has to be loaded

    @model_validator(mode="after")
    def _in_order(self) -> Nodes:
        if self.most is not None and self.most < self.number:
            raise ValueError(f"nodes.most={self.most} is less than nodes.number={self.number}")
        return self


class Fronts(BaseModel):
    """The servers that clients speak to, each on its own port: at most one a machine where the port is given."""

    model_config = ConfigDict(extra="forbid")

    number: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)  # 0: a free one
    cpus: float = Field(default=1.0, ge=0)
    flags: list[str] = []  # of `quire serve`


class Settings(BaseModel):
    """`args` of the application in Serve's file."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""  # a directory or a file, the same on all machines; empty: the embedded model
    flags: list[str] = []  # of both: keys, certificates
    nodes: Nodes = Nodes()
    fronts: Fronts = Fronts()
    node_host: str = ""  # where nodes listen; empty: the machine's address in the cluster
    proxied: bool = False  # requests come through Serve's proxy too
    drain_seconds: float = Field(default=60.0, ge=0)
    registry: str = "quire-registry"


class Registry:
    """Who serves where, and how many are wanted. An entry that is not renewed is dropped: only ages count here."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, float]] = {}  # by node: address, and until when
        # By front: its URL, what it wants, until when.
        self._fronts: dict[str, tuple[str, Wanted | None, float]] = {}

    def renew_node(self, name: str, address: str) -> int:
        """The node serves at the address; returns how many nodes all fronts want together, -1 if none has said so."""
        now = time.monotonic()
        self._nodes[name] = address, now + LEASE_SECONDS
        said = [wanted for _, wanted, until in self._fronts.values() if until > now and wanted is not None]
        return wanted_together(said) if said else -1

    def drop_node(self, name: str) -> None:
        """The node ends."""
        self._nodes.pop(name, None)

    def renew_front(self, name: str, url: str, wanted: Wanted | None) -> list[str]:
        """The front serves at the URL and wants nodes, None: it has not said; returns the nodes' addresses."""
        now = time.monotonic()
        self._fronts[name] = url, wanted, now + LEASE_SECONDS
        return sorted(address for address, until in self._nodes.values() if until > now)

    def fronts(self) -> list[str]:
        """The URLs of the fronts."""
        now = time.monotonic()
        return sorted(url for url, _, until in self._fronts.values() if url and until > now)


def registry_of(settings: Settings) -> Any:
    """The actor, made where there is none; it outlives the application, so that an update finds it."""
    return (
        ray.remote(Registry)
        .options(
            name=settings.registry,
            namespace="quire",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        )
        .remote()
    )


class Child:
    """A program that ends with this process, whatever ends it: then it gets SIGTERM, and may drain.

    Its parent in between waits for the end of a pipe that only this process holds.
    """

    def __init__(self, argv: Sequence[str], drain_seconds: float) -> None:
        self._drain_seconds = drain_seconds
        self._lines: list[str] = []
        self._told = threading.Condition()
        self._is_read = False  # to its end
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(drain_seconds), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            print(line, end="", flush=True)  # into the replica's log, where Ray's dashboard shows it
            with self._told:
                self._lines = [*self._lines[1 - _KEPT_LINES :], line]
                self._told.notify_all()
        with self._told:
            self._is_read = True
            self._told.notify_all()

    def wait_for(self, pattern: re.Pattern[str] | str, seconds: float) -> re.Match[str]:
        """The first line of the log that has the pattern. Raises RuntimeError with the log's end."""
        deadline = time.monotonic() + seconds
        with self._told:
            while True:
                for line in self._lines:
                    if found := re.search(pattern, line):
                        return found
                if not self.is_running:
                    self._told.wait_for(lambda: self._is_read, 1.0)  # its last lines may be on their way
                    self.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"it was not ready after {seconds:g} s:\n{''.join(self._lines)}")
                self._told.wait(0.2)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise RuntimeError where it has ended."""
        if not self.is_running:
            raise RuntimeError(f"it has ended with {self._process.poll()}:\n{''.join(self._lines)}")

    def end(self) -> None:
        """Let it drain, and wait for that."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._drain_seconds + 10)


class Renewal(threading.Thread):
    """Calls a function four times a lease until it is stopped.

    What it raises is no end of it: a later call may succeed, as after the loss of Ray's head.
    """

    def __init__(self, call: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._stopped = call, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(LEASE_SECONDS / 4):
            with suppress(Exception):
                self._call()

    def stop(self) -> None:
        self._stopped.set()


class QuireNode:
    """An engine of the cluster: `quire engine`, its address under a lease."""

    def __init__(self, given: dict[str, Any]) -> None:
        settings = Settings.model_validate(given)
        self._registry, self._name = registry_of(settings), os.urandom(8).hex()
        self._wanted = -1
        if os.nice(0) > 0:
            logging.getLogger("ray.serve").warning(
                "the engine gets a niceness of %d; RAY_worker_niceness=0 at `ray start` ends that", os.nice(0)
            )
        host = settings.node_host or ray.util.get_node_ip_address()
        shown = f"[{host}]" if ":" in host else host
        program = [sys.executable, "-P", "-m", "quire_server.cli", "engine", "--listen", f"{shown}:0"]
        drain = ["--drain-timeout", str(settings.drain_seconds)]
        model = [settings.model] if settings.model else []
        self._child = Child([*program, *drain, *settings.flags, *settings.nodes.flags, *model], settings.drain_seconds)
        self._address = self._child.wait_for(_LISTENS, settings.nodes.start_seconds)[1]
        self._child.wait_for(_READY, settings.nodes.start_seconds)
        self._renewal = Renewal(self._renew)

    def _renew(self) -> None:
        if self._child.is_running:
            self._wanted = ray.get(self._registry.renew_node.remote(self._name, self._address), timeout=LEASE_SECONDS)

    def __call__(self) -> str:
        """The node's address; requests come by its own port."""
        return self._address

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy of `autoscaling` reads."""
        return {"wanted": float(self._wanted)} if self._wanted >= 0 else {}

    def check_health(self) -> None:
        """Serve replaces a node whose process has ended; what its engine does is its own supervisor's affair."""
        self._child.check()

    def __del__(self) -> None:
        """Serve takes the node away: its streams move to others."""
        if hasattr(self, "_renewal"):
            self._renewal.stop()
            with suppress(Exception):
                ray.get(self._registry.drop_node.remote(self._name), timeout=LEASE_SECONDS)
        if hasattr(self, "_child"):
            self._child.end()


class QuireFront:
    """A server of the cluster: `quire serve` on its own port, with the nodes that the registry knows."""

    def __init__(self, given: dict[str, Any], node: Any) -> None:  # noqa: ARG002 - the handle makes Serve deploy nodes first
        settings = Settings.model_validate(given)
        self._settings, self._registry, self._name = settings, registry_of(settings), os.urandom(8).hex()
        self._folder = tempfile.TemporaryDirectory(prefix="quire-front-")
        self._engines = Path(self._folder.name) / "engines"
        self._written: list[str] = []
        self._url, self._wanted = "", None
        self._session: aiohttp.ClientSession | None = None
        self._write(self._first_nodes())
        host = settings.fronts.host
        program = [sys.executable, "-P", "-m", "quire_server.cli", "serve", "--engines", f"file:{self._engines}"]
        place = ["--host", host, "--port", str(settings.fronts.port), "--drain-timeout", str(settings.drain_seconds)]
        model = [settings.model] if settings.model else []
        self._child = Child([*program, *place, *settings.flags, *settings.fronts.flags, *model], settings.drain_seconds)
        # While it waits for a node, nodes come and go: those of another model end during an update.
        self._renewal = Renewal(self._renew)
        self._url = self._child.wait_for(_SERVES, settings.nodes.start_seconds)[1]

    def _first_nodes(self) -> list[str]:
        """The nodes' addresses, when there is one: Serve starts nodes and fronts at the same time."""
        deadline = time.monotonic() + self._settings.nodes.start_seconds
        while time.monotonic() < deadline:
            with suppress(ray.exceptions.GetTimeoutError):  # the actor begins at the same time
                asked = self._registry.renew_front.remote(self._name, "", None)
                found: list[str] = ray.get(asked, timeout=LEASE_SECONDS)
                if found:
                    return found
            time.sleep(LEASE_SECONDS / 4)
        raise RuntimeError(f"no node was ready after {self._settings.nodes.start_seconds:g} s")

    def _renew(self) -> None:
        if not self._child.is_running:
            return
        if self._url:
            with suppress(OSError, ValueError):
                self._wanted = _wanted(self._url)
        found = ray.get(self._registry.renew_front.remote(self._name, self._url, self._wanted), timeout=LEASE_SECONDS)
        if found:  # else Ray has lost its registry rather than we all nodes
            self._write(found)

    def _write(self, addresses: list[str]) -> None:
        if addresses == self._written:
            return
        part = self._engines.with_suffix(".new")
        part.write_text("".join(f"{address}\n" for address in addresses))
        part.replace(self._engines)
        self._written = addresses

    def check_health(self) -> None:
        """Serve replaces a front whose process has ended."""
        self._child.check()

    async def __call__(self, request: Request) -> Response:
        """What comes through Serve's proxy: passed on where the settings say so, else the fronts' own addresses."""
        if not self._settings.proxied:
            return JSONResponse({"fronts": await self._registry.fronts.remote()})
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = self._url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = await self._session.request(
            request.method, url, headers=headers, data=await request.body() or None, allow_redirects=False
        )
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        return StreamingResponse(_body(answer), status_code=answer.status, headers=kept)

    def __del__(self) -> None:
        """Serve takes the front away: what it streams may end."""
        if hasattr(self, "_renewal"):
            self._renewal.stop()
        if hasattr(self, "_child"):
            self._child.end()


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The bytes as they come; a client that leaves closes the connection, by which the front notices."""
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()


def _wanted(url: str) -> Wanted | None:
    """What a front's metrics say that it wants."""
    with urlopen(f"{url}/metrics", timeout=LEASE_SECONDS) as answer:
        text = answer.read().decode()
    found = [
        re.search(rf"^quire_replicas_wanted{end}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        for end in ("", "_at_least")
    ]
    work, at_least = [None if each is None else float(each[1]) for each in found]
    return None if work is None else Wanted(work, int(at_least or 0))


def as_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """So many nodes as the fronts want; Serve holds it within the bounds. Called in Serve's controller."""
    reports = (context.aggregated_metrics or {}).get("wanted", {}).values()
    return math.ceil(max(reports, default=context.target_num_replicas)), {}


def build(given: dict[str, Any]) -> serve.Application:
    """The application of Serve's file. Raises pydantic's ValidationError for unknown or wrong `args`."""
    settings = Settings.model_validate(given)

    nodes, fronts = settings.nodes, settings.fronts
    node_options: dict[str, Any] = {"num_replicas": nodes.number}
    if nodes.most is not None:
        scaling = AutoscalingConfig(
            min_replicas=nodes.number,
            max_replicas=nodes.most,
            policy=AutoscalingPolicy(policy_function=as_wanted),
            upscale_delay_s=2.0,  # the wish itself waits before it falls
            downscale_delay_s=10.0,
            look_back_period_s=5.0,
            metrics_interval_s=1.0,
        )
        node_options = {"autoscaling_config": scaling}
    common = {
        "graceful_shutdown_timeout_s": settings.drain_seconds + 15,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 5.0,
        "max_ongoing_requests": 10_000,
    }
    node = serve.deployment(
        QuireNode,
        name="QuireNode",
        ray_actor_options={"num_cpus": nodes.cpus, "num_gpus": nodes.gpus},
        **node_options,
        **common,
    )
    front = serve.deployment(
        QuireFront,
        name="QuireFront",
        num_replicas=fronts.number,
        ray_actor_options={"num_cpus": fronts.cpus},
        **common,
    )
    # Each gets what concerns it alone, so that Serve does not replace fronts because nodes have changed.
    of_both = settings.model_dump(exclude={"nodes", "fronts", "proxied"})
    own = {"start_seconds": nodes.start_seconds}
    of_front = {**of_both, "fronts": fronts.model_dump(), "proxied": settings.proxied, "nodes": own}
    return front.bind(of_front, node.bind({**of_both, "nodes": nodes.model_dump(exclude={"number", "most"})}))


def _tether(drain_seconds: float, argv: Sequence[str]) -> int:
    """Run the program until it ends, or until standard input does: then SIGTERM, and SIGKILL after its time."""
    # Ray kills the children of a worker that it ends, this process too: then the kernel tells the program. No other
    # thread runs here yet, and this one stays until the end.
    libc = ctypes.CDLL(None)
    program = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
    )

    def release() -> None:
        while os.read(0, 1):  # not by sys.stdin, whose lock would be held when this process ends
            pass
        program.send_signal(signal.SIGTERM)
        try:
            program.wait(drain_seconds + 5)
        except subprocess.TimeoutExpired:
            program.kill()

    threading.Thread(target=release, daemon=True).start()
    return program.wait()


if __name__ == "__main__":
    sys.exit(_tether(float(sys.argv[1]), sys.argv[2:]))
