"""What every route of one running server shares.

Promises: plain references with a known readiness; built by the serve command, read by routes.
Must not know: how any of its parts was built, HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_server.engine_client import EngineClient
    from quire_server.metrics import Metrics
    from quire_server.prompt import ChatTemplate
    from quire_server.settings import Settings
    from quire_server.tokenizer import TextTokenizer


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The server's parts. Mutable in two fields only: `draining` and `unready_reason`."""

    settings: Settings
    tokenizer: TextTokenizer
    prompts: ChatTemplate | None  # None: the model has no chat template
    client: EngineClient
    metrics: Metrics
    model_names: tuple[str, ...]  # the first is the one that replies report
    started: float = field(default_factory=time.time)  # seconds since the epoch
    draining: bool = False
    unready_reason: str | None = None  # loading, engine restarting, engine dead, warming up, ...; None when serving

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.client.plan.scheduler.max_model_len

    def ready(self) -> bool:
        return self.not_ready_because() is None

    def not_ready_because(self) -> str | None:
        """One word or two for a probe's reply; draining wins over everything."""
        return "draining" if self.draining else self.unready_reason

    def knows_model(self, name: str | None) -> bool:
        return name is None or name in self.model_names
