"""What the modules' headers say they must not know, held against what they import.

Every word that a header uses there stands for something one can import.
"""

from __future__ import annotations

import ast
import re

import pytest

from architecture.source import imports, modules, tree, within

# What the words mean. Standard library modules count where nothing else gives access to the thing.
MEANING = {
    "HTTP": ("fastapi", "starlette", "uvicorn", "httptools", "http", "quire_server.http", "quire_server.routes"),
    "asyncio": ("asyncio",),
    "blocks": tuple(f"quire_engine.scheduling.{name}" for name in ("block_pool", "cached_blocks", "kv_allocator")),
    "clocks": ("time", "datetime"),
    "devices": ("quire_kernels",),
    "distributions": ("quire_engine.execution.distribution",),
    "flags": ("argparse", "quire_server.flags"),
    "frameworks": ("fastapi", "starlette", "pydantic", "uvicorn"),
    "kernels": ("quire_kernels",),
    "layers": ("quire_kernels.cpu.layers", "quire_engine.execution.models.decoder"),
    "models": ("quire_engine.execution.models",),
    "policies": ("quire_engine.scheduling.policies",),
    "processes": ("subprocess", "multiprocessing", "quire_engine.process", "quire_server.engine.process"),
    "queues": ("quire_engine.scheduling.roster", "quire_engine.scheduling.scheduler"),
    "requests": ("quire_engine.scheduling.sequence", "quire_server.answering", "quire_server.dialects"),
    "routes": ("quire_server.routes",),
    "sampling": ("quire_engine.execution.sampler", "quire_server.answering.sampling"),
    "sequences": ("quire_engine.scheduling.sequence",),
    "sockets": ("socket", "select"),
    "stop strings": ("quire_server.text.stop_strings",),
    "tensors": ("torch",),
    "text": ("tokenizers", "jinja2", "quire_server.text"),
    "the allocator": ("quire_engine.scheduling.kv_allocator",),
    "the engine": ("quire_engine.engine", "quire_engine.scheduling", "quire_engine.execution", "quire_engine.process"),
    "the event loop": ("asyncio",),
    "the scheduler": ("quire_engine.scheduling.scheduler",),
    "the server": ("quire_server",),
    "threads": ("threading", "concurrent"),
    "tokenizers": ("tokenizers", "quire_server.text.tokenizer"),
    "torch": ("torch",),
    "wire models": ("quire_server.dialects",),
}
TRUST = "quire_kernels.trusted_folder"  # of no kernels: it is there because everybody may import it


def unknown_things(module: str) -> list[str]:
    """The phrases after "must not know" in a module's header."""
    text = " ".join((ast.get_docstring(tree(module)) or "").split())
    found = re.search(r"[Mm]ust not know:? (.*?)(?:[.:;]\s|\.?$)", text)
    return re.split(r",? and | or |, ", found[1]) if found else []


CASES = [(module, thing) for module in sorted(modules()) for thing in unknown_things(module) if thing in MEANING]


@pytest.mark.parametrize(("module", "thing"), CASES)
def test_what_a_module_must_not_know_it_does_not_import(module: str, thing: str):
    known = {name for name in imports(module) - {TRUST} if within(name, MEANING[thing])}
    assert not known


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_header_says_only_what_is_held(module: str):
    """ "Must not know" stands where this test keeps it, and nowhere else."""
    assert not [thing for thing in unknown_things(module) if thing not in MEANING]


def test_the_headers_are_read():
    assert CASES
    assert set(MEANING) == {thing for _, thing in CASES}, "words that no header uses"
