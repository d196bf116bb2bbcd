"""A supervisor whose engine may be absent: it ends by order, and starts again, with the requests that it had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from quire_engine.contract.errors import QuireError
from quire_engine.contract.plan import EnginePlan, for_later_engines
from quire_engine.process.transport import Shutdown
from quire_server.engine.recovery import JournalEntry
from quire_server.engine.restart_policy import RestartBudget
from quire_server.engine.supervisor import EngineState, Supervisor

_STEP_SECONDS = 5.0  # for the step that runs when the engine is to end


class SleepingSupervisor(Supervisor):
    """A supervisor without an engine between `sleep` and `wake`, which keeps the requests as over a crash.

    One call of `sleep` and `wake` at a time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_wanted: Callable[[], None] = lambda: None  # called when a request has come while the engine is asleep

    def adopt(self, entry: JournalEntry) -> None:
        super().adopt(entry)
        if self.state is EngineState.ASLEEP:
            self.on_wanted()

    def expect(self, plan: EnginePlan) -> None:
        """Note that the engine is asleep, and its plan for when it is woken; called instead of `start`."""
        self.plan = plan
        self._checkpoint = plan.identity.checkpoint
        self._config = for_later_engines(self._config, plan)
        self.state = EngineState.ASLEEP

    async def sleep(self, *, keeps_weights: bool) -> None:
        """End the engine process after its step. Requests wait for `wake`, and go on with the same tokens.

        `keeps_weights`: the packed weights stay in memory.
        """
        if self.state is EngineState.DEAD:  # what has failed is forgiven
            self._budget = RestartBudget(self._policy)
        if self.state is not EngineState.STOPPED:
            self.state = EngineState.ASLEEP
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._process is not None:
            self._process.send(Shutdown())
            await self._process.reap(grace_seconds=_STEP_SECONDS)
            self._process = None
        self._recovery.set_aside()
        self._pool.close()
        if not keeps_weights:
            self._weights.close()

    async def wake(self) -> EnginePlan:
        """Start the engine again after `sleep`. Raises as `start` does.

        After a failure the engine is dead, and the requests that waited have ended with an error.
        """
        self.state = EngineState.STARTING
        try:
            return await self.start()
        except Exception as error:  # whatever it is, no request may wait for ever
            if self.state is not EngineState.STOPPED:
                self._give_up(str(error) if isinstance(error, QuireError) else repr(error))
            raise

    def forget_weights(self) -> None:
        """Free the memory of the packed weights once no engine has it mapped; the next engine loads them anew."""
        self._weights.close()

    @property
    def num_live(self) -> int:
        """Unfinished requests whose clients read, be they in the engine or not."""
        return self._recovery.num_going

    @property
    def keeps_weights(self) -> bool:
        """Whether packed weights are in memory, from which an engine starts without a load."""
        return self._weights.is_filled
