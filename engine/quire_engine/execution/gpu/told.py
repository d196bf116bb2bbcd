"""Messages of a GPU's runner to the other ranks of a model, each before work that it issues to its own device.

Must not know: processes, sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from quire_engine.execution.gpu.graphs import Bucket, MixedBucket

Body = AbstractContextManager[None]


class Told(Protocol):
    """Each call is for work that follows it, in the order of the calls. Around a body all ranks compute together."""

    def sent(self, sections: Mapping[str, array[int]]) -> None:
        """Sections of a step, or changes of tables."""
        ...

    def hidden(self, query_lens: Sequence[int], kv_lens: Sequence[int], counts: Sequence[int]) -> Body:
        """All layers of what was sent, as `Forward.hidden` has them."""
        ...

    def graph(self, bucket: Bucket | MixedBucket) -> Body:
        """A graph of what was sent, or what it is captured from."""
        ...

    def kept(self) -> None:
        """Keep only the hidden states of the rows in the section `logit_rows`."""
        ...

    def logits(self, rows: slice) -> Body:
        """The head, of some rows of the hidden states."""
        ...

    def tokens(self, region: int, ids: Tensor) -> None:
        """The ids that a step has left in a region, on the device: the next step finds them in every rank."""
        ...


class Nobody:
    """See `Told`: there are no others."""

    def sent(self, sections: Mapping[str, array[int]]) -> None:
        pass

    def hidden(self, query_lens: Sequence[int], kv_lens: Sequence[int], counts: Sequence[int]) -> Body:
        del query_lens, kv_lens, counts
        return nullcontext()

    def graph(self, bucket: Bucket | MixedBucket) -> Body:
        del bucket
        return nullcontext()

    def kept(self) -> None:
        pass

    def logits(self, rows: slice) -> Body:
        del rows
        return nullcontext()

    def tokens(self, region: int, ids: Tensor) -> None:
        pass
