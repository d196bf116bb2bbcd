"""A model, a machine and a measured load for tests of what `quire bench` makes of them."""

from __future__ import annotations

from quire_bench.limits import Limits
from quire_bench.measures import Measures, measure
from quire_bench.records import Record, Run
from quire_bench.servers import ModelFacts
from quire_bench.workload import LoadPoint, Span, Workload

FACTS = ModelFacts(
    architecture="Qwen3ForCausalLM",
    parameters=1200,
    layer_parameters=1000,
    sampled_parameters=200,
    layer_attention=8,
    sampled_attention=3,
    read_bytes=2400,
    weight_type="bfloat16",
    kv_bytes_per_token=16.0,
    device="cpu",
    kernels="cpu",
    num_threads=2,
)
LIMITS = Limits(
    variant="avx512_bf16",
    threads=2,
    fp32_per_second=1e6,
    bf16_per_second=2e6,
    int8_per_second=4e6,
    read_bytes_per_second=1e6,
    cache_bytes=1000,
)
WORKLOAD = Workload(input=Span(low=4, high=4), output=Span(low=3, high=3))
ALONE = LoadPoint(mode="concurrency", value=1)


def run_with(*, ttft: float, tpot: float, requests: int = 2) -> Measures:
    """Requests of 4 + 3 tokens, one after the other."""
    length = ttft + 2 * tpot
    records = [
        Record(
            due=i * length,
            sent=i * length,
            arrivals=[i * length + ttft + token * tpot for token in range(3)],
            ended=(i + 1) * length,
            outcome="ok",
            input_tokens=4,
            asked_tokens=3,
            output_tokens=3,
        )
        for i in range(requests)
    ]
    return measure(Run(started=0.0, ended=requests * length, records=records))
