"""`make help` lists every target, five of them first, and `make everything` runs targets that are there."""

from __future__ import annotations

import re
import subprocess

from support.documents import ROOT, text

FIRST = ["serve", "test", "check", "bench", "everything"]
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):", text("Makefile"), re.MULTILINE)


def printed(*words: str) -> str:
    """Return what make prints."""
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_help_lists_every_target_and_five_first() -> None:
    first, further = printed("help").split("\nFurther targets:\n")
    names = [re.findall(r"^([a-z0-9-]+) +\S", part, re.MULTILINE) for part in (first, further)]
    assert names[0] == FIRST
    assert sorted(FIRST + names[1]) == sorted({*TARGETS} - {"help"})


def test_every_target_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*?)\n\n", text("Makefile"), re.MULTILINE | re.DOTALL)
    assert sorted(phony.replace("\\\n", " ").split()) == sorted(TARGETS)


def test_everything_names_targets_that_need_nothing_further() -> None:
    (names,) = re.findall(r"^EVERYTHING = (.*?)\n\n", text("Makefile"), re.MULTILINE | re.DOTALL)
    everything = re.sub(r"\$\(if .*?,([a-z-]+)\)$", r"\1", names.replace("\\\n", " ")).split()
    assert {"check", "test", "kernel-matrix", "test-e2e"} <= {*everything} <= {*TARGETS}
    for name in everything:
        (needs,) = re.findall(rf"^{name}:(.*)$", text("Makefile"), re.MULTILINE)
        assert needs.split() == ["$(VENV)/.dev"], name
