"""Hatch's hook for wheels with prebuilt kernels, which `wheels.py` builds; other wheels are made for any machine.

A wheel gets the libraries of the folder that the variable QUIRE_WHEEL_KERNELS names, and the tag of the kind of machine
in QUIRE_WHEEL_MACHINE; auditwheel then replaces the tag by what the libraries really need.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER, MACHINE = "QUIRE_WHEEL_KERNELS", "QUIRE_WHEEL_MACHINE"


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries to a wheel that is not for development."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by Hatch before it packs. Raises FileNotFoundError for a folder without libraries."""
        folder = os.environ.get(FOLDER)
        if folder is None or version == "editable":
            return
        libraries = sorted(Path(folder).glob("*.so"))
        if not libraries:
            raise FileNotFoundError(f"{FOLDER}: there are no libraries in {folder}")
        build_data["force_include"].update({str(each): f"quire_kernels/prebuilt/{each.name}" for each in libraries})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{os.environ[MACHINE]}"
