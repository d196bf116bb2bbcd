"""The fields of beam search that completions and chat completions share, and the neutral options that they make.

Promises: a field of beam search without a search is refused where it would have an effect. Must not know: which
endpoint asked, what else a search can be combined with.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quire_server.answering.options import BeamOptions
from quire_server.errors import BadRequest
from quire_server.wire.common import MAX_CHOICES, GenerationFields


class BeamFields(GenerationFields):
    use_beam_search: bool | None = Field(
        None, description="search the n likeliest texts instead of sampling; told at the end, also in a stream"
    )
    beam_width: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="beams that are followed at once; n by default, and in completions best_of"
    )
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None, description="of beams: a text's log-probability is divided by its tokens to this power; 1 by default"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="of beams: as in transformers; false by default"
    )

    def beam_options(self, best_of: int | None = None) -> BeamOptions | None:
        """None where tokens are sampled. Raises BadRequest."""
        if not self.use_beam_search:
            without_effect = {
                "beam_width": self.beam_width in (None, 1),
                "length_penalty": self.length_penalty in (None, 1.0),
                "early_stopping": self.early_stopping in (None, False),
            }
            for name, is_off in without_effect.items():
                if not is_off:
                    raise BadRequest(f"'{name}' needs 'use_beam_search': true.", param=name)
            return None
        if self.beam_width is not None and best_of not in (None, self.beam_width):
            raise BadRequest("'best_of' and 'beam_width' are one thing in beam search; give one.", param="beam_width")
        named = [("beam_width", self.beam_width), ("best_of", best_of), ("n", self.n or 1)]
        param, width = next((param, width) for param, width in named if width is not None)
        return BeamOptions(
            width=width,
            width_param=param,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )
