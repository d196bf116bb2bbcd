"""The weights of a transformers model: from a checkpoint's files, or an image of packed weights, into its modules.

The names and shapes that a checkpoint has on disk are turned into those of the model by transformers' own rules, one
parameter at a time, so that beside the packed weights one stacked matrix is in memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.checkpoint import Checkpoint
from quire_engine.execution.models.fallback.facts import Facts
from quire_engine.execution.models.fallback.interface import is_experts
from quire_engine.execution.models.fallback.products import (
    FusedExperts,
    PackedExperts,
    PackedLinear,
    Rows,
    Stub,
    TiledMatrix,
    fused_activation,
)
from quire_engine.execution.models.fallback.routers import FusedRouter, bias_name, form_of
from quire_engine.execution.models.matrix_parts import Part, WeightSource
from quire_kernels.activations import Activation
from quire_kernels.kernel_set import ExpertMatrices, KernelSet, LinearWeight, Routing, expert_rows
from quire_kernels.packed_form import PackedForm
from quire_kernels.stored import StoredMatrix, joined

_MOST_INPUTS = 65536  # of a packed matrix
_LINEAR = (nn.Linear, Conv1D)
_PART = re.compile(r"(?P<name>.+?)(?:\[(?P<index>\d+)])?(?P<transposed>\.T)?")
_LOOKED_UP = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # modules whose matrices are used as they are
_EXPERT_BYTES = 320  # of an image's header for one expert's matrices, at most
_STORED = (torch.float32, torch.float16, torch.bfloat16)


class ConvertedCheckpoint:
    """A checkpoint's tensors by the names that the model has for them, as `checkpoint.Tensors`.

    `name[3]` is the fourth matrix of a stack, and `name.T` a transposed one.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, facts: Facts) -> None:
        """Raises ModelLoadError for tensors that are missing or that the model does not use."""
        self._checkpoint, self._model = checkpoint, model
        self._shapes: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._groups: dict[str, Any] = {}  # by the first name: the rule that makes it, with its sources
        self._sources: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._first: dict[str, str] = {}  # the group of each name
        self._held: dict[str, Tensor] = {}  # made and not yet done
        self._kept: set[str] = set()  # groups whose matrix stays as it is stored
        self._done: set[str] = set()
        self._done_groups: set[str] = set()
        self._collect(facts)
        self._check(facts)

    @property
    def num_bytes(self) -> int:
        return self._checkpoint.num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._first

    def error(self, name: str, reason: str) -> ModelLoadError:
        sources = self._sources.get(self._first.get(_plain(name), ""), [])
        if not sources:
            return ModelLoadError(f"tensor {name} {reason}")
        return self._checkpoint.error(sources[0][0], reason if _plain(name) == sources[0][0] else f"({name}) {reason}")

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU, possibly a view of the mapped file."""
        return part_of(name, lambda plain: self._held[plain] if plain in self._held else self._made(plain))

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        """A quantised matrix as the files have it, or several that the model has as one; None: it is decoded."""
        first = self._first.get(_plain(name))
        found = [] if first is None else [self._checkpoint.stored_matrix(each) for each in self._rows_of(first, name)]
        matrices = [each for each in found if each is not None]
        if first is None or not matrices or len(matrices) < len(found):
            return None
        whole = joined(matrices)
        if whole is not None:
            self._kept.add(first)
        return whole

    def _rows_of(self, first: str, name: str) -> list[str]:
        """The matrices of the files that lie below each other in one of the model's; empty: it is made otherwise."""
        rule, sources, part = self._groups[first], self._sources[first], _PART.fullmatch(name)
        if rule is None:
            return [sources[0][0]] if name == _plain(name) else []
        if part is None or part["index"] is None or part["transposed"] or not _stacks(rule):
            return []
        index = int(part["index"])
        of_patterns = [[source for source, own in sources if own == pattern] for pattern in rule.source_patterns]
        return [each[index] for each in of_patterns] if all(index < len(each) for each in of_patterns) else []

    def is_done(self, name: str) -> bool:
        return name in self._done

    def done(self, name: str) -> int:
        """A tensor will not be asked for again; returns the bytes of the files that it was made of."""
        self._done.add(name)
        plain, found = _plain(name), _PART.fullmatch(name)
        value, is_kept = self._held.get(plain), self._first.get(plain) in self._kept
        if value is None and not is_kept:
            return 0
        count = len(self._shapes[plain] if value is None else value)
        if found is not None and found["index"] is not None and int(found["index"]) + 1 < count:
            return 0
        if value is None:
            return self._group_done(self._first[plain])
        del self._held[plain]
        first = self._first[plain]
        if any(self._first[other] == first for other in self._held):
            return 0
        return self._group_done(first)

    def _group_done(self, first: str) -> int:
        if first in self._done_groups:
            return 0
        self._done_groups.add(first)
        return sum(self._checkpoint.done(source) for source, _ in self._sources[first])

    def _collect(self, facts: Facts) -> None:
        """Find the file tensors that make each of the model's tensors, by transformers' rules."""
        model = self._model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, shapes = model.base_model_prefix, self._shapes
        unused: set[str] = set()
        for source in sorted(self._checkpoint.names, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, prefix, shapes)
            if name not in shapes and source in shapes:
                name, pattern = rename_source_key(source, [], [], prefix, shapes)
            rule = by_pattern.get(pattern) if pattern is not None else None
            names = (
                [name] if rule is None else [name.replace(rule.target_patterns[0], to) for to in rule.target_patterns]
            )
            if any(_is_under(each, facts.idle) for each in names) or self._may_be_unused(name):
                unused.add(source)
                continue
            if name not in shapes:
                raise self._checkpoint.error(source, f"is not used by {facts.architecture} of {facts.implementation}")
            self._sources[name].append((source, source if pattern is None else pattern))
            if name not in self._groups:
                self._groups[name] = None if rule is None else deepcopy(rule)
            for each in names:
                self._first.setdefault(each, name)
        self._checkpoint.drop(unused.__contains__)

    def _may_be_unused(self, name: str) -> bool:
        if name in self._shapes:
            return False
        if name.endswith((".rotary_emb.inv_freq", ".inv_freq", ".attn.masked_bias", ".attn.bias")):
            return True  # derived, saved by old exporters
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(pattern, name) for pattern in ignored)

    def _check(self, facts: Facts) -> None:
        """Every parameter that text passes comes from the files, under one of its names."""
        missing = []
        for names, _ in parameters(self._model, facts):
            there = [name for name in names if name in self._first]
            if not there:
                missing.append(names[0])
                continue
            for name in names:  # tied: the other names stand for the same tensor
                self._first.setdefault(name, self._first[there[0]])
            for name in there[1:]:
                self._same(there[0], name)
        if missing:
            listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ModelLoadError(f"missing tensors: {listed}")

    def _same(self, name: str, other: str) -> None:
        if not torch.equal(self.tensor(name), self.tensor(other)):
            raise self.error(other, f"differs from {name}, although the configuration ties them")
        self._held.pop(other, None)

    def _made(self, name: str) -> Tensor:
        first = self._first[name]
        rule, sources = self._groups[first], self._sources[first]
        stored = [(source, pattern, self._checkpoint.tensor(source)) for source, pattern in sources]
        for source, _, value in stored:
            if value.is_floating_point() and value.dtype not in _STORED:
                raise self._checkpoint.error(source, f"is stored as {value.dtype}; supported: F32, F16, BF16")
        if rule is None:
            made = {first: stored[0][2]}
        else:
            collected = deepcopy(rule)
            for source, pattern, value in stored:
                collected.add_tensor(first, source, pattern, value)
            try:
                found = collected.convert(first, model=self._model, config=self._model.config)
            except Exception as error:
                raise self._checkpoint.error(sources[0][0], f"cannot be turned into {first}: {error}") from error
            made = {each: value[0] if isinstance(value, list) else value for each, value in found.items()}
        for each, value in made.items():
            expected = self._shapes.get(each)
            if expected is not None and tuple(expected.shape) != tuple(value.shape):
                raise self._checkpoint.error(
                    sources[0][0], f"has shape {list(value.shape)}, the configuration implies {list(expected.shape)}"
                )
            self._held[each] = value
            self._first.setdefault(each, first)
        if name not in self._held and len(made) == 1:  # another name of a tied tensor
            self._held[name] = next(iter(made.values()))
        if name not in self._held:
            raise self._checkpoint.error(sources[0][0], f"does not give {name}")
        return self._held[name]


def part_of(name: str, whole: Callable[[str], Tensor]) -> Tensor:
    """A matrix of a stack, or a transposed one, of the tensor that `whole` gives by its plain name."""
    value, found = whole(_plain(name)), _PART.fullmatch(name)
    if found is not None and found["index"] is not None:
        value = value[int(found["index"])]
    return value.T if found is not None and found["transposed"] else value


def _stacks(rule: WeightConverter) -> bool:
    """Whether a rule stacks experts, each of a matrix or of several, one below the other."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in rule.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _plain(name: str) -> str:
    found = _PART.fullmatch(name)
    return name if found is None else found["name"]


def _is_under(name: str, modules: tuple[str, ...]) -> bool:
    return any(name.startswith(module + ".") for module in modules)


def parameters(model: Any, facts: Facts) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Every parameter that text passes, with all its names: tied ones have several."""
    names: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if not _is_under(name, facts.idle):
            names.setdefault(id(value), ([], value))[0].append(name)
    yield from names.values()


def keeps_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers insists on float32 for a parameter of a model of this type."""
    kept = [*(model._keep_in_fp32_modules_strict or ())]
    if dtype is torch.float16:
        kept += model._keep_in_fp32_modules or ()
    return any(re.search(each.replace("*", ".*"), name) for each in kept)


class Sources(Protocol):
    """The source of weights for each type in which they are kept."""

    def __call__(self, dtype: torch.dtype) -> WeightSource: ...


class Loaded:
    """Fills a model's modules. `packed_bytes`: of all matrices; `num_parameters` as the configuration counts them."""

    def __init__(
        self, model: Any, facts: Facts, kernels: KernelSet, dtype: torch.dtype, *, rows: Rows, sources: Sources
    ) -> None:
        self._model, self._facts, self._kernels, self._dtype = model, facts, kernels, dtype
        self._rows, self._sources = rows, sources
        self.packed_bytes = 0
        self.num_parameters = sum(value.numel() for _, value in parameters(model, facts))
        self._name = {id(value): names[0] for names, value in parameters(model, facts)}
        self._tensors: dict[int, Tensor] = {}  # by the parameter that they replace
        self._forms: dict[type, Routing | None] = {}  # of routers, by their class
        self._routers: tuple[str, ...] = ()  # those that were replaced

    def fill(self, has_buffer: Callable[[str], bool]) -> None:
        """Load every parameter, and the buffers of the state that the checkpoint has."""
        model, head = self._model, self._model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        prefixes = {module: name for name, module in model.named_modules()}
        # The largest matrices come while little else is in memory.
        self._own(embedding, prefixes[embedding])
        if head is not None and self._is_packed(head):
            self._replace(prefixes[head], self._linear(head, prefixes[head], wide=True))
        for name, module in list(model.named_modules()):
            if _is_under(name + ".", self._facts.idle) or module is embedding or isinstance(module, PackedLinear):
                continue
            if name not in self._facts.read and self._is_packed(module):
                self._replace(name, self._linear(module, name, wide=False))
            elif is_experts(module) and self._packs(module.down_proj):
                self._experts(module, name)
            elif _is_under(name, self._routers):
                continue
            elif (form := self._form(module)) is not None:
                self._router(module, name, form, has_buffer)
            else:
                self._own(module, name)
        self._buffers(has_buffer)

    def _packs(self, value: Tensor) -> bool:
        return self._dtype_of(value) is self._dtype and value.shape[-1] <= _MOST_INPUTS

    def _is_packed(self, module: nn.Module) -> bool:
        return type(module) in _LINEAR and self._packs(module.weight)  # type: ignore[arg-type]

    def _dtype_of(self, value: Tensor) -> torch.dtype:
        """The type that a parameter is kept in: the model's, but float32 where transformers insists on it."""
        if keeps_float32(self._model, self._name[id(value)], self._dtype):
            return torch.float32
        return value.dtype if value.dtype is torch.float32 else self._dtype

    def _linear(self, module: Any, place: str, *, wide: bool) -> PackedLinear:
        outputs, inputs = tuple(module.weight.shape)
        if isinstance(module, Conv1D):
            outputs, inputs = inputs, outputs
        source, name = self._sources(self._dtype), self._name[id(module.weight)]
        bias = None if module.bias is None else self._name[id(module.bias)]
        part = f"{name}.T" if isinstance(module, Conv1D) else name
        tied = self._tensors.get(id(module.weight))
        if tied is not None and bias is None:
            weight = source.head(place, part, tied)
        else:
            weight = source.matrix(place, [Part(part)], [] if bias is None else [Part(bias)])
        self._count(weight, inputs * outputs)
        stub = Stub(module.weight)
        return PackedLinear(weight, self._kernels, self._rows, (inputs, outputs), stub, wide=wide)

    def _count(self, weight: LinearWeight, values: int) -> None:
        size = self._kernels.packed_bytes
        self.packed_bytes += values * self._dtype.itemsize if size is None else size(weight)

    def _experts(self, module: Any, place: str) -> None:
        if self._kernels.given_experts is not None and (activation := fused_activation(module)) is not None:
            return self._fused_experts(module, place, activation)
        packed: list[list[LinearWeight]] = []
        widths: list[int] = []
        for attribute in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            weight = getattr(module, attribute)
            name, bias = self._name[id(weight)], None
            if module.has_bias:
                bias = self._name[id(getattr(module, f"{attribute}_bias"))]
            end = ".T" if module.is_transposed else ""
            each = []
            for expert in range(len(weight)):
                biases = [] if bias is None else [Part(f"{bias}[{expert}]")]
                source = self._sources(self._dtype)
                each.append(source.matrix(f"{name}[{expert}]", [Part(f"{name}[{expert}]{end}")], biases))
                self._count(each[-1], weight[expert].numel())
            packed.append(each)
            widths.append(weight.shape[2] if module.is_transposed else weight.shape[1])
            del module._parameters[attribute]
            setattr(module, attribute, None)
            if bias is not None:
                del module._parameters[f"{attribute}_bias"]
        up, down = packed
        module.__dict__["quire_experts"] = PackedExperts(
            self._kernels, up, down, (widths[0], widths[1]), self._facts.inner_multiple
        )
        return self._own(module, place)

    def _fused_experts(self, module: Any, place: str, activation: Activation) -> None:
        """Two matrices of all experts, for the op that computes them."""
        source, turned = self._sources(self._dtype), ".T" if module.is_transposed else ""
        wide, down = module.gate_up_proj, module.down_proj
        count, (hidden, twice) = len(wide), sizes_of(wide, turned=module.is_transposed)
        inner = twice // 2

        def parts(attribute: str, end: str, rows: int, first: int = 0) -> list[Part]:
            name, filled = self._name[id(getattr(module, attribute))], expert_rows(rows)
            each = (f"{name}[{expert}]{end}" for expert in range(count))
            return [Part(one, start=first, stop=first + rows, filled=filled) for one in each]

        def pair(attribute: str, end: str) -> tuple[list[Part], list[Part]]:
            return parts(attribute, end, inner), parts(attribute, end, inner, inner)

        gate, up = pair("gate_up_proj", turned)
        biases: list[Part] = []
        if module.has_bias:
            of_gate, of_up = pair("gate_up_proj_bias", "")
            biases = [*of_gate, *of_up]
        above = source.gate_up(self._name[id(wide)], gate, up, biases)
        biases = parts("down_proj_bias", "", hidden) if module.has_bias else []
        below = source.matrix(self._name[id(down)], parts("down_proj", turned, hidden), biases)
        self._count(above, wide.numel())
        self._count(below, down.numel())
        for attribute in ("gate_up_proj", "down_proj"):
            del module._parameters[attribute]
            setattr(module, attribute, None)
            if module.has_bias:
                del module._parameters[f"{attribute}_bias"]
        matrices = ExpertMatrices(count=count, inner=inner, gate_up=above, down=below, activation=activation)
        module.__dict__["quire_experts"] = FusedExperts(self._kernels, matrices)
        self._own(module, place)

    def _form(self, module: nn.Module) -> Routing | None:
        """How a router chooses; None: it is none, or none that the kernels compute."""
        if self._kernels.route is None or not type(module).__name__.endswith("Router"):
            return None
        kind = type(module)
        if kind not in self._forms:
            self._forms[kind] = form_of(module, self._model.config.get_text_config(decoder=True), self._dtype)
        return self._forms[kind]

    def _router(self, module: Any, place: str, form: Routing, has_buffer: Callable[[str], bool]) -> None:
        pack, source, added = self._kernels.pack_router, self._sources(self._dtype), None
        if pack is None:
            raise ModelLoadError(f"the {self._kernels.name} kernels choose no experts")
        wide = self._dtype_of(module.weight) is torch.float32
        weight = source.tensor(self._name[id(module.weight)], wide=wide)
        bias = getattr(module, "bias", None)
        bias = None if bias is None else source.tensor(self._name[id(bias)])
        beside = bias_name(module)
        if beside is not None:
            holder, _, attribute = beside.rpartition(".")
            values = getattr(module.get_submodule(holder), attribute)
            full = self._name.get(id(values), f"{place}.{beside}")
            there = id(values) in self._name or has_buffer(full)
            added = (source.tensor(full, wide=True) if there else values.float()).flatten().contiguous()
        routing = replace(form, weight=pack(weight, bias), selection_bias=added)
        self.packed_bytes += weight.nbytes
        self._routers = (*self._routers, place)
        self._replace(place, FusedRouter(self._kernels, routing, len(weight), self._rows))

    def _own(self, module: nn.Module, place: str) -> None:
        """The module's own parameters as plain tensors, or as matrices that multiply in tiles."""
        del place
        for attribute, value in list(module._parameters.items()):
            if value is None or value.device.type != "meta":
                continue
            loaded = self._tensors.get(id(value))
            if loaded is None:
                loaded = self._sources(self._dtype_of(value)).tensor(self._name[id(value)])
                self._tensors[id(value)] = loaded
                if loaded.dim() > 1 and not isinstance(module, nn.Embedding):
                    self.packed_bytes += loaded.nbytes
            if loaded.dim() > 1 and not isinstance(module, _LOOKED_UP):
                del module._parameters[attribute]
                setattr(module, attribute, loaded.as_subclass(TiledMatrix))
            else:
                module._parameters[attribute] = nn.Parameter(loaded, requires_grad=False)

    def _buffers(self, has_buffer: Callable[[str], bool]) -> None:
        known = {name for name, _ in self._model.named_parameters()}
        for name in list(self._model.state_dict()):
            holder, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(holder)
            if name in known or attribute not in module._buffers or _is_under(name, self._facts.idle):
                continue
            if has_buffer(name):
                module._buffers[attribute] = self._sources(module._buffers[attribute].dtype).tensor(name)

    def _replace(self, name: str, module: nn.Module) -> None:
        holder, _, attribute = name.rpartition(".")
        setattr(self._model.get_submodule(holder), attribute, module)


def sizes_of(stack: Any, *, turned: bool) -> tuple[int, int]:
    """Inputs and outputs of each matrix in a stack."""
    first, second = stack.shape[1:]
    return (first, second) if turned else (second, first)


def most_image_bytes(model: Any, facts: Facts, form: PackedForm, alignment: int) -> int:
    """An upper bound on the bytes of the image of a model's packed weights."""
    packed = {
        id(value)
        for name, module in model.named_modules()
        if (type(module) in _LINEAR and name not in facts.read) or is_experts(module)
        for value in module._parameters.values()
        if value is not None and value.dim() > 1
    }
    embedding = model.get_input_embeddings().weight
    total = 0
    for names, value in parameters(model, facts):
        if id(value) in packed:
            rows, columns = value.shape[-2:]
            most = max(form.most_bytes(rows, columns), form.most_bytes(columns, rows))
            total += value.numel() // (rows * columns) * most
        if value is embedding:
            total += value.nbytes + alignment
        elif id(value) not in packed or keeps_float32(model, names[0], torch.float16):
            total += 4 * value.numel() + alignment
    for value in model.buffers():
        total += value.nbytes + alignment
    return total


def fits_image(model: Any, facts: Facts, header_bytes: int) -> bool:
    """Whether an image's header can name every matrix; that of many experts cannot."""
    fused = {
        id(value)
        for module in model.modules()
        if is_experts(module) and fused_activation(module) is not None
        for value in module._parameters.values()
    }
    entries = sum(
        2 * (len(value) if value.dim() == 3 and id(value) not in fused else 1) for _, value in parameters(model, facts)
    )
    return entries * _EXPERT_BYTES < header_bytes
