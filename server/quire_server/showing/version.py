"""The version of Quire that is installed, for every part that names it.

Promises: read once, when this module is imported; its file is not read by a request.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("quire")
