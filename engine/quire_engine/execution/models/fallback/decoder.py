"""A transformers model with our products and attention inside, as a runner drives it.

All rows of a step are one flat sequence [1, T]. The model's own code orders the operations; attention knows which row
belongs to which sequence, and everything else computes a row by itself. T is filled up to a multiple of
`Facts.row_multiple`, see there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire_engine.contract.kv_groups import KVLayout
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.fallback.attention import PagedAttention
from quire_engine.execution.models.fallback.facts import Facts, StepArguments
from quire_engine.execution.models.fallback.interface import AttentionCall, attach, set_interfaces
from quire_engine.execution.models.fallback.products import PackedLinear
from quire_engine.execution.models.fallback.states import States
from quire_engine.execution.models.fallback.weights import Loaded, Sources
from quire_engine.ranks import ALONE, Rank
from quire_kernels.kernel_set import ChoiceRows, KernelSet


class Steps:
    """The present step, as a model's modules and matrices see it (`interface.Computes`, `products.Rows`)."""

    def __init__(self, attention: PagedAttention) -> None:
        self.num_rows = self.num_padded = 0
        self._attention = attention
        self._names: dict[nn.Module, str] = {}
        self._step: ModelInput | None = None
        self._kv: Tensor | None = None

    def know(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}

    def begin(self, step: ModelInput, kv: Tensor, num_padded: int) -> None:
        self._step, self._kv = step, kv
        self.num_rows, self.num_padded = len(step.input_ids), num_padded

    def rows(self, num_rows: int, num_padded: int) -> None:
        """Rows that pass the head alone."""
        self.num_rows, self.num_padded = num_rows, num_padded

    def end(self) -> None:
        self._step = self._kv = None
        self.num_rows = self.num_padded = 0

    def attend(self, call: AttentionCall) -> Tensor:
        if self._step is None or self._kv is None:
            raise RuntimeError("attention outside of a step")
        mixed = self._attention.compute(self._names[call.module], call, self._step, self._kv)
        return F.pad(mixed, (0, 0, 0, 0, 0, self.num_padded - self.num_rows))[None]

    def experts(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        used = self.num_rows if len(hidden) == self.num_padded else len(hidden)
        out = module.__dict__["quire_experts"].compute(module, hidden[:used], index[:used], weights[:used])
        return F.pad(out, (0, 0, 0, len(hidden) - used))


class FallbackDecoder:
    """See `served.ServedModel`."""

    def __init__(
        self,
        facts: Facts,
        model: Any,
        kernels: KernelSet,
        *,
        layout: KVLayout,
        dtype: torch.dtype,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        sources: Sources,
        has_buffer: Callable[[str], bool],
        rank: Rank = ALONE,
    ) -> None:
        """`model`: with parameters on the meta device, which `sources` has. `has_buffer`: it has such a buffer too.

        `rank`: whose heads this process computes, with a pool of `layout` for them.
        """
        self.config = facts
        self._kernels, self._model = kernels, model
        self._steps = Steps(PagedAttention(facts, kernels, block_size, max_model_len, layout, rank=rank))
        set_interfaces(model)
        loaded = Loaded(model, facts, kernels, dtype, rows=self._steps, sources=sources)
        loaded.fill(has_buffer)
        self.num_parameters, self._packed_bytes = loaded.num_parameters, loaded.packed_bytes
        for module in model.modules():
            _fix_angles(module, max_model_len)
        attach(model, self._steps)
        head = model.get_output_embeddings()
        self._head = head if facts.plain_head and isinstance(head, PackedLinear) else None
        self._steps.know(model)
        self._states = States(model, facts.mixers, max_num_seqs) if facts.mixers else None
        self._arguments = StepArguments(model.forward)
        body = model.get_submodule(facts.body)
        self._body_forward = body.forward
        self._hidden: Tensor | None = None
        self._output: Any = None  # the type of the decoder's output: logits are only asked for behind a step
        body.forward = self._body

    @property
    def chains_decodes(self) -> bool:
        return False

    @property
    def packed_bytes(self) -> int | None:
        """Memory of all matrices; None: the kernel set keeps them as they are."""
        return None if self._kernels.packed_bytes is None else self._packed_bytes

    @torch.inference_mode()
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor:
        """The sample rows' last hidden states [S, H], behind the final norm. Writes every row's K and V into `kv`."""
        count = len(step.input_ids)
        if self._states is not None:
            self._states.forget(step.released)
        if not count:
            return torch.zeros(0, self.config.hidden_size)
        if self._states is not None:
            starts = [end - rows for end, rows in zip(step.kv_lens, step.query_lens, strict=True)]
            self._states.begin(step.sequence_ids, starts, step.query_lens)
        padded = self._padded(count)
        ids, positions = (F.pad(x, (0, padded - count))[None] for x in (step.input_ids, step.positions))
        self._steps.begin(step, kv, padded)
        try:
            self._model(**self._arguments(ids, positions))
            raise RuntimeError("the model's decoder was not called")
        except _Computed as computed:
            hidden = computed.hidden
        finally:
            self._steps.end()
        if self._states is not None:
            self._states.end(step.sequence_ids, step.kv_lens, step.forks)
        return hidden[0].index_select(0, step.sample_rows)

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """[S, H] float64: `forward` gives the rows behind the final norm already."""
        return hidden.to(torch.float64)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H], as `forward` returns them, to float32 logits [S, V], by the model's own head."""
        count = len(hidden)
        if not count:
            return torch.zeros(0, self.config.vocab_size)
        padded = self._padded(count)
        self._hidden = F.pad(hidden, (0, 0, 0, padded - count))[None]
        self._steps.rows(count, padded)
        ids = torch.zeros(1, padded, dtype=torch.int64)
        try:
            found = self._model(**self._arguments(ids, ids)).logits
        finally:
            self._hidden = None
            self._steps.end()
        return found[0, :count].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def greedy(self, hidden: Tensor, allowed: Tensor | None = None) -> tuple[list[int], list[bool]] | None:
        """Choose like `KernelSet.greedy`; None where the kernels lack it, or the head scales or caps its logits."""
        if self._kernels.greedy is None or self._kernels.linear is None or self._head is None:
            return None
        return self._kernels.greedy(hidden, None, self._head.packed, allowed)

    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]:
        del logits, rows
        raise ValueError("the transformers implementation chooses no tokens on a device")

    def _padded(self, count: int) -> int:
        return -(-count // self.config.row_multiple) * self.config.row_multiple

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the decoder's forward pass: end a step without the head, or return the rows for the head."""
        if self._hidden is not None:
            return self._output(last_hidden_state=self._hidden)
        output = self._body_forward(*args, **kwargs)
        self._output = type(output)
        raise _Computed(output.last_hidden_state)


class _Computed(Exception):
    """The last hidden states of a step are there, and the head is not wanted yet."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _fix_angles(module: nn.Module, max_model_len: int) -> None:
    """Let a row's angles depend on its position alone.

    The types `dynamic` and `longrope` look at the longest position of the call, which belongs to another sequence.
    Here `longrope` takes the long factors exactly if sequences longer than the original length are served, and
    `dynamic` the frequencies of the length that the model was made for, which no sequence exceeds.
    """
    types = getattr(module, "rope_type", None)
    if types is None or not hasattr(module, "original_max_seq_len"):
        return
    config: Any = module.config
    by_layer: dict[str | None, str] = types if isinstance(types, dict) else {None: types}
    for layer, rope_type in by_layer.items():
        if rope_type != "longrope":
            continue
        rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
        original = rope["original_max_position_embeddings"]
        if max_model_len > original:
            named = {} if layer is None else {"layer_type": layer}
            long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=original + 1, **named)
            module._buffers["inv_freq" if layer is None else f"{layer}_inv_freq"] = long
    fixed = {
        layer: "fixed" if rope_type == "longrope" or "dynamic" in rope_type else rope_type
        for layer, rope_type in by_layer.items()
    }
    module.rope_type = fixed if isinstance(types, dict) else fixed[None]  # type: ignore[assignment]
