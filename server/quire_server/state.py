"""What every route of one running server shares.

Promises: plain references with a known readiness; built by the serve command, read by routes.
Must not know: how any of its parts was built, how they work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request

from quire_server.text.text_threads import TextThreads

if TYPE_CHECKING:
    from quire_server.engine.engine_client import EngineClient
    from quire_server.metrics.metrics import Metrics
    from quire_server.settings import Settings
    from quire_server.text.prompt import ChatTemplate
    from quire_server.text.tokenizer import TextTokenizer


def _engine_serves() -> str | None:
    return None


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The server's parts; only `draining` changes while it runs."""

    settings: Settings
    tokenizer: TextTokenizer
    prompts: ChatTemplate | None  # None: the model has no chat template
    client: EngineClient
    metrics: Metrics
    model_names: tuple[str, ...]  # the first is the one that replies report
    engine_trouble: Callable[[], str | None] = _engine_serves  # asked at each probe: why the engine cannot serve now
    started: float = field(default_factory=time.time)  # seconds since the epoch
    draining: bool = False
    text: TextThreads = field(init=False)  # tokenizer and prompts, off the event loop

    def __post_init__(self) -> None:
        self.text = TextThreads(self.tokenizer, self.prompts)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.client.plan.scheduler.max_model_len

    def unready_reason(self) -> str | None:
        """A few words for a probe's reply, such as "draining" or "engine restarting"; None when serving."""
        return "draining" if self.draining else self.engine_trouble()

    def knows_model(self, name: str | None) -> bool:
        """Whether requests may name this model; None asks for the default."""
        return name is None or name in self.model_names


def state_of(request: Request) -> ServerState:
    """The state of the server that this request came to."""
    return cast(ServerState, request.app.state.quire)
