"""The products of a layer that adapters add to, and the numbers by which adapters know them."""

from __future__ import annotations

from typing import Literal

Site = Literal["qkv", "o", "gate_up", "down"]
# Of a layer, in the order of their numbers. gate_up and down are those of its MLP, or in a layer whose rows choose
# experts instead those of the expert that all rows share.
SITES: tuple[Site, ...] = ("qkv", "o", "gate_up", "down")


def site_of(layer: int, site: Site) -> int:
    """The number by which adapters know a layer's product."""
    return layer * len(SITES) + SITES.index(site)
