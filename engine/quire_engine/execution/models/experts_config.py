"""The experts that a config.json describes, in the words of its family.

Promises: numbers that do not fit together are refused by the name of their option. Must not know: torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_engine.execution.models.families import Experts
from quire_engine.execution.models.options import Options

_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model's layers, of which each row of a layer chooses `top_k`."""

    entry: Experts  # the family's
    count: int
    top_k: int
    inner: int
    layers: tuple[bool, ...]  # whether a layer has them
    normalised: bool  # the weights of a row's experts are divided by their sum
    scale: float = 1.0  # of the weights
    least_sum: float = 0.0
    groups: int = 1
    kept_groups: int = 1
    shared_inner: int = 0  # of the MLP that every row has beside its experts; 0: there is none


def experts_of(options: Options, entry: Experts, num_layers: int) -> ExpertsConfig | None:
    """None: the options say that there are none. Raises NotNative, ModelLoadError."""
    count_key = _count_key(options, entry)
    if entry.switch is not None and not options.boolean(entry.switch, False):
        for key in (count_key, entry.top_k, entry.inner):
            options.raw(key)
        return None
    count = options.integer(count_key, entry.default_count, most=_MOST_EXPERTS)
    top_k = options.integer(entry.top_k, entry.default_top_k)
    if top_k > count:
        raise options.error(f"{entry.top_k}={top_k} cannot be more than the {count} experts")
    groups, kept_groups = _groups(options, count, top_k) if entry.groups else (1, 1)
    inner = options.integer(entry.inner, entry.default_inner)
    return ExpertsConfig(
        entry=entry,
        count=count,
        top_k=top_k,
        inner=inner,
        layers=_layers(options, entry, num_layers),
        normalised=entry.normalised is None or options.boolean(entry.normalised, entry.default_normalised),
        scale=options.number(entry.scale, 1.0) if entry.scale else 1.0,
        least_sum=options.number(entry.least_sum, 1e-12) if entry.least_sum else 0.0,
        groups=groups,
        kept_groups=kept_groups,
        shared_inner=_shared_inner(options, entry, inner),
    )


def _count_key(options: Options, entry: Experts) -> str:
    if entry.count is not None:
        return entry.count
    return "num_local_experts" if options.given("num_local_experts") else "num_experts"


def _groups(options: Options, count: int, top_k: int) -> tuple[int, int]:
    groups, kept = options.integer("n_group", 1), options.integer("topk_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise options.error(f"n_group={groups} does not divide {count} experts into groups of two or more")
    if kept > groups:
        raise options.error(f"topk_group={kept} cannot be more than the {groups} groups")
    if top_k > kept * (count // groups):
        raise options.error(f"topk_group={kept} groups have fewer experts than the {top_k} of a token")
    return groups, kept


def _shared_inner(options: Options, entry: Experts, inner: int) -> int:
    if entry.shared_inner is not None:
        return options.integer(entry.shared_inner, entry.default_shared, least=0)
    if entry.shared_count is not None:
        return inner * options.integer(entry.shared_count, entry.default_shared, least=0)
    return 0


def _layers(options: Options, entry: Experts, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts."""
    layers = range(num_layers)
    if entry.layers == "steps":
        each, without = options.integer("decoder_sparse_step", 1), options.raw("mlp_only_layers") or []
        if not isinstance(without, list) or any(type(layer) is not int for layer in without):
            raise options.error(f"mlp_only_layers must be a list of layers, not {without!r}")
        return tuple(layer not in without and (layer + 1) % each == 0 for layer in layers)
    if entry.layers == "behind":
        first = options.integer(entry.first, entry.default_first, least=0)
        return tuple(layer >= first for layer in layers)
    if entry.layers == "between":
        first, last = (_place(options, key, at) for key, at in (("start", 1), ("end", -1)))
        each = options.integer("moe_layer_interval", 1)
        last = num_layers - 1 if last == -1 else last
        return tuple(first <= layer <= last and (layer + 1) % each == 0 for layer in layers)
    return (True,) * num_layers


def _place(options: Options, end: str, default: int) -> int:
    return options.integer(f"moe_layer_{end}_index", default, least=-1)
