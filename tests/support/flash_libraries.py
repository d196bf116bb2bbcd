"""The adapters of the attention libraries, loaded with stand-ins of recorded versions; and faults in how they call.

Promises: a fault changes one call's arguments and nothing else. Must not know: what is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from quire_kernels.flash import fa3_fwd, flash_attn_2, flash_attn_3, torch_varlen
from quire_kernels.flash.library import Loaded
from support import flash_standins
from support.flash_signatures import entry
from support.flash_standins import standin

FLASH_ATTN_2, FLASH_ATTN_3 = "flash_attn/flash_attn_interface.py", "hopper/flash_attn_interface.py"
TORCH = "torch/nn/attention/varlen.py"

Arguments = dict[str, Any]
Fault = Callable[[Arguments], Arguments]


def varlen_of_2(version: str = "2.8.3.post2") -> Callable[..., torch.Tensor]:
    found = entry("flash-attn", version, FLASH_ATTN_2, "flash_attn_varlen_func")
    return standin(found, flash_standins.flash_attn_2_varlen)


def with_kvcache_of_2(version: str = "2.8.3.post2") -> Callable[..., torch.Tensor]:
    found = entry("flash-attn", version, FLASH_ATTN_2, "flash_attn_with_kvcache")
    return standin(found, flash_standins.flash_attn_2_with_kvcache)


def with_kvcache_of_3(version: str = "2.8.3.post2") -> Callable[..., torch.Tensor]:
    found = entry("flash-attn", version, FLASH_ATTN_3, "flash_attn_with_kvcache")
    return standin(found, flash_standins.flash_attn_3_with_kvcache)


def varlen_of_torch(version: str = "2.13.0") -> Callable[..., torch.Tensor]:
    return standin(entry("torch", version, TORCH, "varlen_attn"), flash_standins.torch_varlen)


def varlen_of_3_fwd(version: str = "0.0.3") -> Callable[..., torch.Tensor]:
    found = entry("fa3-fwd", version, "fa3_fwd_interface.py", "flash_attn_varlen_func")
    return standin(found, flash_standins.fa3_fwd_varlen)


def load_3_fwd(version: str = "0.0.3") -> Loaded:
    return fa3_fwd.loaded(varlen_of_3_fwd(version), version=version)


def load_2(version: str = "2.8.3.post2") -> Loaded:
    return flash_attn_2.loaded(varlen_of_2(version), with_kvcache_of_2(version), version=version)


def load_3(version: str = "2.8.3.post2") -> Loaded:
    return flash_attn_3.loaded(with_kvcache_of_3(version), version=version)


def load_torch(version: str = "2.13.0") -> Loaded:
    return torch_varlen.loaded(varlen_of_torch(version), version=version)


def faulty(function: Callable[..., torch.Tensor], fault: Fault) -> Callable[..., torch.Tensor]:
    """The function, called with other arguments than it is called with."""

    def called(**arguments: Any) -> torch.Tensor:
        return function(**fault(arguments))

    called.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return called


def without(name: str) -> Fault:
    return lambda arguments: {each: value for each, value in arguments.items() if each != name}


def changed(name: str, change: Callable[[Any], Any]) -> Fault:
    def fault(arguments: Arguments) -> Arguments:
        assert name in arguments, name
        return {**arguments, name: change(arguments[name])}

    return fault


def exchanged(one: str, other: str) -> Fault:
    return lambda arguments: {**arguments, one: arguments[other], other: arguments[one]}


def added(name: str, value: object) -> Fault:
    return lambda arguments: {**arguments, name: value}
