"""Every family through the C++ kernels in bfloat16: as near the truth as the reference, the same however computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_kernels.cpu.ops import cpu_kernel_set
from support.checkpoints import ALL_FAMILIES, make_checkpoint
from support.covering import few
from support.model_steps import Model, random_ids
from support.offline import generate

# What their default shapes leave out.
OPTIONS = {"phi3": {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4}}}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_computes_what_the_reference_does(family, tmp_path):
    path = make_checkpoint(tmp_path, family, dtype="bfloat16", **OPTIONS.get(family, {}))
    token_ids = random_ids(100)
    truth = Model(path, dtype=torch.float32).logits(token_ids)
    plain = Model(path, dtype=torch.bfloat16).logits(token_ids)
    model = Model(path, dtype=torch.bfloat16, kernels=cpu_kernel_set(2))
    ours = model.logits(token_ids)

    def error(found: torch.Tensor) -> torch.Tensor:
        by_row = (found - truth).square().mean(dim=1)
        # Roundings before it decide between a row's experts where two are nearly equal; few rows are all of the error.
        return (by_row.median() if model.decoder.config.experts else by_row.mean()).sqrt()

    assert error(ours) <= 1.5 * error(plain)
    for chunk in (1, 7, 64):
        assert torch.equal(model.logits(token_ids, chunk, seed=chunk), ours), f"chunks of {chunk}"


# One of each way to keep keys and values: one group of layers, windows, widths of two kinds, sinks; and experts.
@pytest.mark.parametrize("family", few(ALL_FAMILIES, "llama", "gemma3", "gemma4", "gpt_oss", "qwen3_moe", "phi3"))
def test_preempted_and_resumed_requests_have_their_own_tokens(family, tmp_path):
    path = make_checkpoint(tmp_path, family, dtype="bfloat16", **OPTIONS.get(family, {}))
    asked = EngineConfig(
        model=str(path),
        device="cpu",
        num_threads=1,
        packed_cache=False,
        max_model_len=128,
        limits=SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=40, prefill_chunk=24, admission="prompt"),
    )
    wanted = [
        GenerationRequest(
            request_id=f"r{seed}",
            prompt_token_ids=tuple(random_ids(20 + 9 * seed, seed, 500)),
            sampling=SamplingParams(temperature=float(seed % 2), seed=seed, num_logprobs=1),
            stop=StopParams(max_new_tokens=40),
        )
        for seed in range(5)
    ]
    roomy = build(replace(asked, kv_memory=8 << 20))
    alone = {name: each for one in wanted for name, each in generate(roomy, [one]).items()}
    fewest = roomy.plan.scheduler.num_blocks_for(128) + 2
    narrow = build(replace(asked, kv_memory=fewest * roomy.plan.pool.bytes_per_block))
    found = generate(narrow, wanted)
    assert sum(each.num_preemptions for each in found.values())
    assert found == alone
    resumed = [replace(one, resumed_token_ids=(tuple(alone[one.request_id, 0].token_ids[:17]),)) for one in wanted]
    for name, each in generate(narrow, resumed).items():
        assert each.token_ids == alone[name].token_ids[17:]
        assert each.logprobs == alone[name].logprobs[17:]
