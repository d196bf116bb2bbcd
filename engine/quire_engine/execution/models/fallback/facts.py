"""The facts that the engine plans with, learnt from a forward pass of the model without memory.

Every attention layer of a model calls one registered function. On the meta device that call has the shapes, the scale
and the window of the layer and costs nothing, so no family needs a description.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.kv_groups import KVHeads
from quire_engine.execution.models.fallback.interface import AttentionCall, attach, set_interfaces
from quire_engine.execution.models.fallback.model_class import IMPLEMENTATION, ModelClass, in_steps
from quire_engine.execution.models.fallback.products import fused_activation
from quire_engine.execution.models.fallback.states import SequenceState, cache_parameter
from quire_engine.execution.models.parameters import Parameters
from quire_engine.execution.models.quantisation import Quantisation

_ROWS = 5  # of the probe: a number that no width is a multiple of by chance
_LANES = 64  # values that torch computes at once: two vectors of sixteen floats, or of 32 bf16
_EXACT_POWERS = (2, 3, 0.5, -0.5)  # computed by products and roots, whose results are rounded in one way
# Single-number functions whose vector form rounds other than their scalar form, which torch takes for an array's end.
_ROUNDED = frozenset(
    f"{name}{end}"
    for name in (
        *("exp", "exp2", "expm1", "log", "log1p", "log2", "sigmoid", "tanh", "sin", "cos", "erf", "erfc", "pow"),
        *(
            "silu",
            "gelu",
            "mish",
            "elu",
            "selu",
            "celu",
            "softplus",
            "logsigmoid",
            "hardswish",
            "xielu",
            "sinh",
            "cosh",
        ),
    )
    for end in ("", "_")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """One attention layer; `name` is that of its module."""

    name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A model as `served.ModelFacts` has it, and how the fallback computes it."""

    architecture: str
    implementation: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: str
    body: str  # the module that gives the last hidden states, and that the head follows
    attention: tuple[AttentionFacts, ...]  # in the order of the forward pass, which is that of the pool
    mixers: tuple[str, ...]  # modules that keep a state for each sequence
    state_bytes: int  # of one sequence
    row_multiple: int  # a step is computed with a multiple of so many rows, see `_Probe`
    inner_multiple: int  # the same for rows inside an expert
    plain_head: bool  # logits are what the last linear module gives, unscaled
    read: tuple[str, ...]  # linear modules whose weights others read: they stay plain
    idle: tuple[str, ...]  # modules that text does not pass, such as vision towers: they are not loaded
    parameters: Parameters
    fused_experts: bool = False  # every module of experts is one op, over matrices as they multiply
    quantisation: Quantisation | None = None  # of the checkpoint's matrices

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_heads(self) -> int:
        return max(layer.num_heads for layer in self.attention)

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        """The KV heads of each layer, all alike: a plain pool holds the layers whose heads differ."""
        return (KVHeads(self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def num_kv_heads(self) -> int:
        return max(layer.num_kv_heads for layer in self.attention)

    @property
    def head_dim(self) -> int:
        return max(layer.key_dim for layer in self.attention)

    @property
    def is_recurrent(self) -> bool:
        return bool(self.mixers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; none where layers differ in keys and values, since all blocks are equal."""
        kinds = {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in self.attention}
        return tuple([layer.window if len(kinds) == 1 else None for layer in self.attention])

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have heads of one width, for keys and values, which one pool holds."""
        kinds = {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in self.attention}
        return (
            len(kinds) == 1
            and all(layer.key_dim == layer.value_dim for layer in self.attention)
            and all(layer.num_heads % layer.num_kv_heads == 0 for layer in self.attention)
        )


def learn_facts(made: ModelClass, dtype: torch.dtype) -> Facts:
    """Raises ModelLoadError for a model that cannot be computed this way, with the reason."""
    with in_steps(made):
        model = made.on_meta(dtype)
        probe = _Probe(model)
        logits = probe.run()
    if not probe.attention:
        raise ModelLoadError(f"{made.name} of {IMPLEMENTATION} computes its attention by code of its own")
    mixers = _mixers(model, probe)
    config, body = made.text_config, probe.body()
    # The rows of a recurrent module are computed one by one, in any step.
    widths = {width for width, names in probe.widths.items() if not all(_is_in(name, mixers) for name in names)}
    hidden_size = probe.outputs[body].shape[-1]
    idle = _idle(model, probe.called)
    return Facts(
        architecture=made.name,
        implementation=IMPLEMENTATION,
        vocab_size=logits.shape[-1],
        hidden_size=hidden_size,
        intermediate_size=max((width for width in probe.widths), default=hidden_size),
        max_position_embeddings=_positions(config),
        dtype=made.dtype,
        body=body,
        attention=tuple(probe.attention.values()),
        mixers=tuple(mixers),
        state_bytes=_state_bytes(model, mixers, made),
        row_multiple=_multiple(widths),
        inner_multiple=_multiple(probe.inner_widths),
        plain_head=logits is probe.head_output,
        read=tuple(sorted(probe.read)),
        idle=idle,
        parameters=_parameters(model, idle, probe.mixtures),
        fused_experts=all(each.is_fused for each in probe.mixtures),
        quantisation=made.quantisation,
    )


@dataclass(frozen=True, slots=True)
class _Mixture:
    """One module of experts."""

    numbers: int  # in the matrices of all
    count: int
    top_k: int  # of them that multiply a token
    is_fused: bool  # all of it is one op of the kernels, over matrices as they multiply


class _Probe(TorchFunctionMode):
    """A forward pass over `_ROWS` rows without values.

    Calls that would read a value get none: nothing is chosen, nothing is listed. `widths` are the values of a row in
    each function of `_ROUNDED`: where a step's rows times such a width is a multiple of `_LANES`, no value is computed
    by the scalar form, and a row's bits do not depend on the number of rows beside it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.attention: dict[str, AttentionFacts] = {}
        self.widths: dict[int, set[str]] = {}  # with the modules where they occur
        self.inner_widths: set[int] = set()
        self.mixtures: list[_Mixture] = []
        self.called: dict[nn.Module, None] = {}  # in order
        self.outputs: dict[str, Tensor] = {}
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self.read: set[str] = set()
        self.head_output: Tensor | None = None
        self._head = model.get_output_embeddings()
        self._inside = 0  # experts
        self._running: list[nn.Module] = []
        self._owners = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Linear)}

    def run(self) -> Tensor:
        """The shape of the logits."""
        model, handles = self._model, []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._begin))
            handles.append(module.register_forward_hook(self._end))
        attach(model, self)
        set_interfaces(model)
        ids = torch.zeros(1, _ROWS, dtype=torch.int64, device="meta")
        try:
            with torch.inference_mode(), self:
                return model(**StepArguments(model.forward)(ids, ids)).logits  # type: ignore[no-any-return]
        finally:
            for handle in handles:
                handle.remove()

    def body(self) -> str:
        """The outermost module that the model calls and that contains all attention. Raises ModelLoadError."""
        for module in self.called:
            name: str = self._names[module]
            if name and name in self.outputs and all(each.startswith(name + ".") for each in self.attention):
                return name
        raise ModelLoadError(f"{type(self._model).__name__} of {IMPLEMENTATION} has no decoder apart from its head")

    def _begin(self, module: nn.Module, args: Any) -> None:
        del args
        self.called.setdefault(module)
        self._running.append(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        self._running.pop()
        if module is self._head:
            self.head_output = output
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, Tensor):
            self.outputs[self._names[module]] = hidden

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name = getattr(func, "__name__", "")
        subject = args[0] if args and isinstance(args[0], Tensor) else None
        if subject is not None and subject.device.type == "meta":
            if name in _ROUNDED and subject.numel() % _ROWS == 0 and not (name == "pow" and args[1] in _EXACT_POWERS):
                self._note(subject.numel() // _ROWS)
            if name in _VALUES:
                return _VALUES[name](subject)
            if name == "split" and isinstance(args[1], list):  # by numbers that were not known
                known = sum(args[1][:-1])
                args = (subject, [*args[1][:-1], subject.shape[(kwargs or {}).get("dim", 0)] - known], *args[2:])
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            for value in args:
                owner = self._owners.get(id(value))
                if owner is not None and owner is not self._running[-1]:
                    self.read.add(self._names[owner])
        return result

    def _note(self, width: int) -> None:
        if self._inside:
            self.inner_widths.add(width)
        else:
            self.widths.setdefault(width, set()).add(self._names[self._running[-1]])

    def attend(self, call: AttentionCall) -> Tensor:
        """See `interface.Computes`."""
        name = self._names[call.module]
        scale = call.query.shape[-1] ** -0.5 if call.scaling is None else float(call.scaling)
        self.attention[name] = AttentionFacts(
            name=name,
            num_heads=call.query.shape[1],
            num_kv_heads=call.key.shape[1],
            key_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            scale=scale,
            window=call.window,
            softcap=None if call.softcap is None else float(call.softcap),
            sinks=call.sinks is not None,
        )
        return call.query.new_empty(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])

    def experts(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `interface.Computes`. The gate is passed for the widths of its functions."""
        del weights
        wide = module.gate_up_proj if module.has_gate else module.up_proj
        is_fused = fused_activation(module) is not None and not module.is_transposed
        numbers = wide.numel() + module.down_proj.numel()
        self.mixtures.append(_Mixture(numbers, count=len(wide), top_k=index.shape[-1], is_fused=is_fused))
        inner = wide.shape[2] if module.is_transposed else wide.shape[1]
        self._inside += 1
        rows = hidden.new_empty(_ROWS, inner)
        (module._apply_gate if module.has_gate else module.act_fn)(rows)
        self._inside -= 1
        return torch.empty_like(hidden)


def _no_rows(subject: Tensor) -> Tensor:
    return torch.empty(0, subject.dim(), dtype=torch.int64, device="meta")


_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": _no_rows,
    "unique": lambda subject: torch.empty(0, dtype=subject.dtype, device="meta"),
    "tolist": lambda subject: [0] * (subject.shape[0] if subject.dim() else 0),
    "item": lambda _: 0,
    "__bool__": lambda _: False,
    "__int__": lambda _: 0,
    "__float__": lambda _: 0.0,
    "__index__": lambda _: 0,
}


class StepArguments:
    """The arguments of one flat step by the names that a model's forward takes."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        names = inspect.signature(forward).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
        self._takes_positions = takes_any or "position_ids" in names
        self._plain: dict[str, Any] = {"use_cache": False} if takes_any or "use_cache" in names else {}

    def __call__(self, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """ids and positions are [1, T]."""
        given = {**self._plain, "input_ids": ids}
        return {**given, "position_ids": positions} if self._takes_positions else given


def _mixers(model: Any, probe: _Probe) -> list[str]:
    """The innermost modules that take a cache and do not contain attention: they keep a state for each sequence."""
    takes = {
        module: name
        for name, module in model.named_modules()
        if module in probe.called and hasattr(module, "layer_idx") and cache_parameter(module) is not None
    }
    attends = set(probe.attention)
    found = []
    for module, name in takes.items():
        inside = [each for each in module.modules() if each is not module]
        if any(each in takes for each in inside):
            continue
        if name in attends or any(each.startswith(name + ".") for each in attends):
            continue
        found.append(name)
    return found


def _state_bytes(model: Any, mixers: list[str], made: ModelClass) -> int:
    """Bytes that one sequence's state takes, by a pass of one row through each mixer's cache."""
    if not mixers:
        return 0
    state = SequenceState(model.config)
    probe = _Probe(model)
    handles = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, cache_parameter(module) or "": state}

    for name in mixers:
        handles.append(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        probe.run()
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{made.name} of {IMPLEMENTATION}: its state cannot be kept apart: {line}") from error
    finally:
        for handle in handles:
            handle.remove()
    return state.num_bytes


def _is_in(name: str, modules: list[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def _multiple(widths: set[int]) -> int:
    return math.lcm(1, *(_LANES // math.gcd(width, _LANES) for width in widths if width))


def _positions(config: Any) -> int:
    for name in (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
    ):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048


def _idle(model: Any, called: Collection[nn.Module]) -> tuple[str, ...]:
    """The outermost modules outside of the decoder that no row of text passes."""
    decoder = model.get_decoder()
    inside = set(decoder.modules())
    found: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(each + ".") for each in found) or module in inside:
            continue
        if any(each in called or each in inside for each in module.modules()):
            continue
        if any(True for _ in module.parameters()):
            found.append(name)
    return tuple(found)


def _parameters(model: Any, idle: tuple[str, ...], mixtures: Sequence[_Mixture]) -> Parameters:
    """The counts by use, for the plan. Where layers choose among experts in several ways, all count for every token."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = embedding.weight.numel()
    tied = head is not None and head.weight is embedding.weight
    linear = small = 0
    for name, value in model.named_parameters():
        if value is embedding.weight or (head is not None and value is head.weight):
            continue
        if any(name.startswith(each + ".") for each in idle):
            continue
        if value.dim() > 1:
            linear += value.numel()
        else:
            small += value.numel()
    size = table if head is None else head.weight.numel()
    counted = Parameters(embedding=table, head=size, linear=linear, tail=0, small=small, tied=tied)
    ways = {(each.count, each.top_k) for each in mixtures}
    if len(ways) != 1:
        return counted
    ((count, top_k),) = ways
    return replace(counted, experts=sum(each.numbers for each in mixtures), num_experts=count, top_k=top_k)
