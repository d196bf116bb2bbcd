"""What operators send to /admin and get from it.

Promises: one order at a time, and no field without an effect. Must not know: how orders are carried out.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DrainStatus(BaseModel):
    """Whether new requests are refused, and how many of the accepted ones are left."""

    draining: bool
    in_flight: int


class AbortOrder(BaseModel):
    """Which requests to end: one of the three."""

    model_config = ConfigDict(extra="forbid")

    request_id: Annotated[
        str | None, Field(min_length=1, max_length=256, description="x-request-id, a reply's id, or the engine's own")
    ] = None
    tenant: Annotated[str | None, Field(min_length=1, max_length=64, description="all that this tenant has")] = None
    all: Annotated[bool, Field(description="all that there is")] = False

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        if [self.request_id is not None, self.tenant is not None, self.all].count(True) != 1:
            raise ValueError("name the requests by one of 'request_id', 'tenant' and 'all': true")
        return self


class Aborted(BaseModel):
    """What was ended: the engine's requests, of which a client's with several prompts is several."""

    num_aborted: int
    request_ids: list[str]  # by their clients' names, each once


class CacheDropped(BaseModel):
    """KV blocks whose content nobody will find any more."""

    device_blocks: int  # of the pool, held by nobody
    host_blocks: int  # of the host's memory, with their files on disk
