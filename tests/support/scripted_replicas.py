"""`LocalReplicas` over supervisors without processes: engines answer, die and come back as a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineStats, GenerationRequest, StepOutput, TokenOutput
from quire_engine.process.transport import Abort, Frame
from quire_server.engine.local_replicas import LocalReplicas
from quire_server.engine.recovery import PROBE, Loss
from quire_server.engine.replica_routing import Router
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.fake_engine_process import make_plan
from support.plans import changed
from support.supervising import Client

BLOCKS = 512


@dataclass(slots=True, eq=False)
class FakeConnection:
    """What a supervisor sees of an engine: frames go in, and it ends in one way or another."""

    ended_by_others: bool = False
    end_is_doubtful: bool = False
    progressed: bool = True
    connected: bool = True
    pid: int = 0
    silence: float = 0.0
    ending: str = "ended as the test said"
    frames: list[Frame] = field(default_factory=list)

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)


class ScriptedSupervisor(Supervisor):
    """A supervisor whose engine is a `FakeConnection`; crashes are accounted for as those of real ones."""

    numerics = "same"

    async def start(self) -> EnginePlan:
        self._arrive()
        assert self.plan is not None
        return self.plan

    async def stop(self) -> None:
        self.state = EngineState.STOPPED
        for entry in self._recovery.dismiss():
            self._fail(entry, "the server is shutting down")

    @property
    def connection(self) -> FakeConnection:
        assert isinstance(self._process, FakeConnection)
        return self._process

    @property
    def requests(self) -> dict[str, GenerationRequest]:
        """What the engine has got and was not told to abort."""
        got: dict[str, GenerationRequest] = {}
        for frame in self.connection.frames:
            if isinstance(frame, GenerationRequest):
                got[frame.request_id] = frame
            elif isinstance(frame, Abort):
                got.pop(frame.request_id, None)
        return got

    def say(self, request_id: str, *tokens: int, finish: Any = None, choice: int = 0, **fields: Any) -> None:
        """The engine's output, whether or not anybody waits for it."""
        output = TokenOutput(request_id=request_id, choice=choice, token_ids=tokens, finish=finish, **fields)
        stats = EngineStats(blocks_total=BLOCKS, blocks_free=BLOCKS, total_preemptions=1)
        self._deliver(StepOutput(step_id=1, outputs=(output,), stats=stats))

    def die(self, loss: Loss = Loss.DOUBTFUL) -> None:
        self.connection.ended_by_others, self.connection.end_is_doubtful = loss is Loss.KILL, loss is Loss.DOUBTFUL
        self.connection.connected = False
        self.state = EngineState.RESTARTING
        self._account_for(self.connection)  # type: ignore[arg-type]
        self.on_lost()

    def come_back(self) -> None:
        """Another engine is ready, and has answered the probe."""
        self._arrive()
        self.connection.send(self._recovery.prove())
        self.on_ready()
        self.say(PROBE.request_id, 1, finish="length")

    def never_come_back(self) -> None:
        self._give_up("as the test said")

    def _arrive(self) -> None:
        self._process = FakeConnection()  # type: ignore[assignment]
        self.plan = changed(make_plan(), identity={"numerics": self.numerics})
        self.state = EngineState.READY


@dataclass(slots=True)
class Replicas:
    """The set, its supervisors and one client."""

    set: LocalReplicas
    each: list[ScriptedSupervisor]
    client: Client
    moved: list[float]

    def holder(self, request_id: str) -> ScriptedSupervisor:
        """The only engine that has the request, under whatever name."""
        (found,) = (one for one in self.each if any(name.partition("~")[0] == request_id for name in self.ids(one)))
        return found

    def ids(self, supervisor: ScriptedSupervisor) -> list[str]:
        return list(supervisor.requests) if supervisor.state is EngineState.READY else []

    def run_id(self, request_id: str) -> str:
        (found,) = (name for name in self.ids(self.holder(request_id)) if name.partition("~")[0] == request_id)
        return found


async def replicas(
    count: int = 2, *, policy: str = "least_tokens", failover_seconds: float = 30.0, numerics: Sequence[str] = ()
) -> Replicas:
    """A set that has started."""
    made: list[ScriptedSupervisor] = []

    def make(*args: Any, **options: Any) -> ScriptedSupervisor:
        supervisor = ScriptedSupervisor(*args, **options)
        supervisor.numerics = numerics[len(made)] if numerics else "same"
        made.append(supervisor)
        return supervisor

    together = LocalReplicas(
        EngineConfig(model="ok"),
        RestartPolicy(),
        count=count,
        router=Router(policy),
        failover_seconds=failover_seconds,
        make=make,
    )
    client, moved = Client(), []
    together.on_step, together.on_moved = client.on_step, moved.append
    await together.start()
    return Replicas(set=together, each=made, client=client, moved=moved)
