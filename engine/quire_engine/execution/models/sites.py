"""The products of a layer that adapters add to, and the numbers by which adapters know them."""

from __future__ import annotations

from typing import Literal

Site = Literal["qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down"]
# Of a layer, in the order of their numbers. gate_up and down are those of its MLP, or in a layer whose rows choose
# experts instead those of the expert that all rows share; the last two are those of the experts that rows choose.
SITES: tuple[Site, ...] = ("qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down")


def site_of(layer: int, site: Site) -> int:
    """The number by which adapters know a layer's product."""
    return layer * len(SITES) + SITES.index(site)


def place_of(site: int) -> Site:
    """The product within its layer."""
    return SITES[site % len(SITES)]
