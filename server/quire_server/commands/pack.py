"""`quire pack`: packs a model's weights into their file ahead of the first start.

Promises: exit code 0 when the file is there, 1 when the model cannot be loaded or the file not be kept, 2 for settings
that cannot work. Must not know: torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from quire_engine.contract.errors import ConfigError, EngineDead, QuireError
from quire_server.checkpoint.locate import localized
from quire_server.engine.json_child import replies
from quire_server.flags import SERVE, parse_flags
from quire_server.flags import build_parser as parser_of
from quire_server.settings import SettingsError
from quire_server.showing.loading import has_terminal, shown
from quire_server.showing.terminal import BAD_USAGE, DONE, FAILED, complain


class _Reply(msgspec.Struct):
    """The progress, or the finished file."""

    phase: str = ""
    done: int = 0
    total: int = 0
    file: str = ""


def _say(line: str) -> None:
    print(f"quire pack: {line}", file=sys.stderr, flush=True)


def run(argv: Sequence[str]) -> int:
    """Pack with the flags of `quire serve`; the process's exit code."""
    try:
        settings = localized(parse_flags(argv, prog="quire pack"))
        with shown(bar=has_terminal(), say=_say) as update:
            for reply in replies("pack", asdict(settings.engine_config()), _Reply):
                if reply.file:
                    break
                update(reply.phase, reply.done, reply.total)
            else:
                raise EngineDead("the pack process ended without a word")
    except (SettingsError, ConfigError) as error:
        return complain("pack", str(error), BAD_USAGE)
    except QuireError as error:
        return complain("pack", str(error), FAILED)
    print(reply.file)
    return DONE


def build_parser() -> argparse.ArgumentParser:
    """The flags of `quire serve`, which this command takes."""
    return parser_of(SERVE)
