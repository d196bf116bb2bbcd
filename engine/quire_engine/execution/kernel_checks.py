"""Chooses a kernel set, has the checks of its ops at a start, and replaces those that fail.

Promises: an op that fails is replaced by the reference's with a warning, or the start ends with a ConfigError.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution import distribution
from quire_engine.execution.distribution import uniform
from quire_engine.execution.logit_rules import SampleRow
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.found import FoundModel
from quire_engine.execution.progress import Tell
from quire_engine.execution.sampler import Sampler
from quire_kernels.kernel_set import ChoiceRows, KernelSet, KVFormat
from quire_kernels.select import select
from quire_kernels.verify.checks import ModelSizes, short_checks
from quire_kernels.verify.experts import ExpertSizes, RoutingForm
from quire_kernels.verify.findings import Check, Outcome, Subject, compared_alone, together
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.repair import Irreplaceable, without

_log = logging.getLogger(__name__)
_ROWS = (1, 7)
_ADVICE = "run `quire verify` and send what it writes; set kernels to reference to serve without them"
_MOST_TOKENS = 8192
# Of the mass before a token: probabilities are float32, and each device rounds their exponentials in its own way.
_BORDER = 2.0**-20


def model_sizes(model: ModelConfig, block_size: int) -> ModelSizes:
    """The sizes of a model that the checks depend on."""
    heads = Heads(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        window=min((window for window in model.windows if window is not None), default=None),
        norms=model.qk_norm,
        softcap=model.score_cap,
    )
    experts = None
    if model.experts is not None:
        experts = ExpertSizes(
            count=model.experts.count,
            top_k=model.experts.top_k,
            hidden=model.hidden_size,
            inner=model.experts.inner,
            activation=model.activation,
            biases=model.experts.entry.biases,
            form=RoutingForm(
                scoring=model.experts.entry.scoring,
                normalised=model.experts.normalised,
                biased=model.experts.entry.selection_bias,
                groups=model.experts.groups,
                kept_groups=model.experts.kept_groups,
                scaled=model.experts.entry.own_norm or model.experts.scale != 1.0,
                own_norm=model.experts.entry.own_norm,
            ),
        )
    return ModelSizes(
        hidden=model.hidden_size,
        inner=model.intermediate_size,
        heads=heads,
        vocabulary=model.vocab_size,
        experts=experts,
    )


def start_checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    """Each op of a kernel set once or twice, as a start on a GPU asks for."""
    yield from short_checks(subject, sizes)
    yield from choice_checks(subject, sizes.vocabulary, _ROWS)


def repaired(
    kernels: KernelSet, failed: Mapping[str, str], *, reference_pool: bool, deterministic: bool = False
) -> KernelSet:
    """The kernel set without the ops that failed. Raises ConfigError where it cannot serve without them.

    `failed`: the problem of each. `reference_pool`: the set's pool has the reference's layout. `deterministic`: a row's
    bits must not depend on its batch, on a device where the reference's bits do.
    """
    for op, problem in failed.items():
        _log.warning(
            "the %s op of the %s kernels failed on this machine and is replaced by a slower one: %s;"
            " run `quire verify` and send what it writes",
            op, kernels.name, problem,
        )  # fmt: skip
    try:
        return without(kernels, failed, reference_pool=reference_pool, deterministic=deterministic)
    except Irreplaceable as error:
        ops = ", ".join(f"{op} ({problem})" for op, problem in failed.items())
        raise ConfigError(
            f"kernels={kernels.name}: these ops failed on this machine: {ops}; {error}; {_ADVICE}"
        ) from None


def choice_checks(subject: Subject, vocabulary: int, rows: Sequence[int]) -> Iterator[Check]:
    """Checks of a kernel set's `choose` against the CPU's sampler, at these numbers of rows: drawn and greedy."""
    if subject.kernels.choose is None:
        return
    for count in rows:
        yield Check(op="choose", case=f"{count} rows", run=_Draws(subject, min(vocabulary, _MOST_TOKENS), count).check)


class _Draws:
    """`count` rows of logits with sampling parameters in every mixture.

    A token that differs from the sampler's is a fault unless the draw falls on the border between two tokens.
    """

    def __init__(self, subject: Subject, vocabulary: int, count: int) -> None:
        self._subject = subject
        source, generator = random.Random(count), torch.Generator().manual_seed(count)
        # Large for few tokens, small for most, as models' are; rounded, so that some are equal.
        normal = torch.randn(count, vocabulary, generator=generator)
        self._logits = (normal * 16).round() / 4
        self._rows = [
            SampleRow(
                sampling=SamplingParams(
                    temperature=source.choice([0.0, 0.05, 0.6, 1.0, 2.5]),
                    top_k=source.choice([0, 0, 1, 5, 40, vocabulary - 1, vocabulary]),
                    top_p=source.choice([1.0, 1.0, 0.95, 0.5]),
                    min_p=source.choice([0.0, 0.0, 0.05, 0.5]),
                    seed=source.getrandbits(63),
                ),
                stop=StopParams(max_new_tokens=1),
                choice=source.randrange(5),
                prompt_token_ids=(),
                output_token_ids=(),
                position=source.randrange(1, 5000),
                logits_row=row,
            )
            for row in range(count)
        ]

    def check(self) -> Outcome:
        """The tokens, the flags, and the first and last row alone."""
        logits, count = self._logits.clone(), len(self._rows)
        broken = count - 1 if count > 2 else count
        logits[broken:] = torch.nan
        ids, finite, possible = self._choose(logits, self._rows)
        if finite != [row < broken for row in range(count)]:
            return Outcome(problem=f"{finite} tells wrongly which rows are finite")
        if not all(possible[:broken]):
            return Outcome(problem=f"{possible} tells wrongly for which rows a token is left")
        if not all(0 <= token < logits.shape[1] for token in ids):
            return Outcome(problem=f"{ids} are not all tokens of the vocabulary")
        wanted = Sampler().choose(logits, range(count), self._rows).ids.tolist()
        for row in range(broken):
            if ids[row] != wanted[row] and not self._on_the_border(row, ids[row]):
                sampling = self._rows[row].sampling
                return Outcome(problem=f"row {row} got token {ids[row]}, not {wanted[row]}, by {sampling}")
        alone = [
            compared_alone(
                self._choose(logits[row : row + 1], self._rows[row : row + 1])[0] == ids[row : row + 1],
                self._subject,
                f"row {row} of {count}",
            )
            for row in ((0, broken - 1) if count > 1 else ())
        ]
        return together(*alone)

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[bool], list[bool]]:
        choose, device = self._subject.kernels.choose, self._subject.device
        assert choose is not None
        asked = [row.sampling for row in rows]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        ids, finite, possible = choose(
            logits.to(device, copy=True),
            ChoiceRows(
                logits_rows=torch.arange(len(rows), device=device),
                temperature=column([one.temperature for one in asked], torch.float32),
                top_k=column([one.top_k for one in asked], torch.int32),
                top_p=column([one.top_p for one in asked], torch.float64),
                min_p=column([one.min_p for one in asked], torch.float32),
                seed=column([one.seed for one in asked], torch.int64),
                choice=column([row.choice for row in rows], torch.int64),
                position=column([row.position for row in rows], torch.int64),
                draws=any(one.temperature for one in asked),
                limits_k=any(one.top_k for one in asked),
                limits_p=any(one.top_p < 1 for one in asked),
            ),
        )
        return ids.tolist(), finite.tolist(), possible.tolist()

    def _on_the_border(self, row: int, token: int) -> bool:
        """Whether the draw is as good as at the beginning or the end of the token's share of the mass."""
        asked, logits = self._rows[row].sampling, self._logits[row : row + 1]
        if asked.temperature == 0:
            return False
        scaled = (logits - logits.amax()) / asked.temperature
        if 0 < asked.top_k < logits.shape[1]:
            scaled = scaled.masked_fill(~distribution.keep_top_k(scaled, [asked.top_k]), -torch.inf)
        mass = scaled.softmax(dim=1)
        if asked.top_p < 1:
            mass = mass * distribution.keep_top_p(mass, [asked.top_p])
        if asked.min_p > 0:
            mass = mass * distribution.keep_min_p(mass, [asked.min_p])
        if not float(mass[0, token]):
            return False
        ends = mass[0].double().cumsum(0)
        drawn = uniform(asked.seed, self._rows[row].choice, self._rows[row].position) * float(ends[-1])
        begin = float(ends[token] - mass[0, token])
        return begin - _BORDER <= drawn <= float(ends[token]) + _BORDER


def select_kernels(  # noqa: PLR0917 - the inputs of the choice
    config: EngineConfig,
    found: FoundModel,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
    tell: Tell,
    beside: KernelSet | None,
) -> KernelSet:
    """The model's kernel set: the one that the settings name, or the best for the machine. Raises ConfigError."""
    try:
        kernels = select(
            device,
            dtype,
            config.kernels,
            kv=KVFormat(head_dim=found.head_dim, block_size=config.limits.block_size, kv_type=config.kv_cache_dtype),
            quantization=config.quantization,
            deterministic=config.deterministic,
            attention=config.attention,
            threads=num_threads,
            cpu_variant=config.cpu_variant,
            on_compiled=lambda done, total: tell(f"compiling the kernels, {done} of {total} files", 0, 0),
            beside=beside,
            left_out=config.left_out_paths or (),
        )
    except ValueError as error:
        asked = "" if config.attention == "auto" else f", attention={config.attention}"
        raise ConfigError(f"kernels={config.kernels}{asked}: {error}") from None
    return found.over(kernels)
