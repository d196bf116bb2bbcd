"""The secrets of links between fronts and nodes, made by the commands that docs/nodes.md shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from quire_engine.links.link_security import LinkSecurity, link_security
from support.documents import section


def make_secrets(folder: Path) -> LinkSecurity:
    """Make them in a folder, and read them."""
    script = re.search(r"```sh\n(.*?)```", section("docs/nodes.md", "Two machines"), re.DOTALL)
    assert script is not None
    subprocess.run(["bash", "-euc", script[1]], cwd=folder, check=True, capture_output=True)
    return link_security(folder / "peer.crt", folder / "peer.key", folder / "ca.crt")
