"""The Python files that a process of ours may run: those that were installed, not those that it finds on its way.

Promises: no file of the working directory is imported, whatever its name. Must not know: torch.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path


class WritableSearchPath(OSError):
    """Another user could plant a module in a folder of the search path; names the folder and the fix."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules as a process, without the working directory on its search path (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def leave_out_working_directory(search_path: list[str], environment: MutableMapping[str, str] = os.environ) -> bool:
    """Take empty entries out of PYTHONPATH, for this process and its children; returns whether there were any.

    An empty entry is the working directory. `PYTHONPATH=/lib:$PYTHONPATH` makes one where the variable was not set.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    named = [entry for entry in entries if entry]
    if not named or len(named) == len(entries):
        return False
    environment["PYTHONPATH"] = os.pathsep.join(named)
    here = os.getcwd()
    if here not in map(os.path.abspath, named) and here in search_path:
        search_path.remove(here)
    return True


def check_search_path(search_path: Sequence[str]) -> None:
    """Raise WritableSearchPath for an entry that any user of the system may write to, or that is not absolute.

    Folders above an entry count as well: a user who may write to one can put another folder in the entry's place,
    except where it is sticky, as /tmp is.
    """
    for entry in search_path:
        if not os.path.isabs(entry):
            raise WritableSearchPath(
                f"Python's search path has {entry or 'an empty entry'!r}, which follows the working directory:"
                " any file there could be run; take it out of PYTHONPATH"
            )
        folder = Path(os.path.realpath(entry))
        for each in (folder, *folder.parents):
            try:
                mode = each.stat().st_mode
            except OSError:  # Python imports nothing from what is not there
                continue
            is_shared = bool(mode & stat.S_ISVTX) and each != folder
            if mode & stat.S_IWOTH and not is_shared:
                raise WritableSearchPath(
                    f"{each} can be written to by every user, and Python imports modules from {entry};"
                    f" chmod o-w {each}, or take it out of PYTHONPATH"
                )
