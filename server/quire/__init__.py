"""The offline API: `from quire import LLM, SamplingParams`, then `LLM(model=...).generate(prompts)`.

Promises: the names and shapes of vLLM's scripts, and the same tokens as the server. Must not know: torch.
"""

from quire.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire.llm import LLM
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.prompts import LoRARequest
from quire.sampling_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from quire.vectors import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]
