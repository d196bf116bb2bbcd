"""The model without a server: `from quire import LLM, SamplingParams`, then `LLM(model=...).generate(prompts)`.

Promises: the names and shapes that scripts written for vLLM use, and the tokens that the server would give. Must not
know: torch.
"""

from quire.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire.llm import LLM
from quire.outputs import CompletionOutput, Logprob, RequestOutput
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
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]
