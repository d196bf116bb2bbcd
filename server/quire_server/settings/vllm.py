"""Command lines and variables written for vLLM, in our settings.

Promises: nothing of them is dropped in silence: it becomes a setting, a note, a warning or a refusal with the reason.
Must not know: which flags there are, what our settings do.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from quire_server.settings.sources import SettingsError, read_config
from quire_server.settings.vllm_flags import FLAGS, VllmFlag

_DEST = "vllm:"


def add_vllm_flags(parser: argparse.ArgumentParser, ours: Collection[str]) -> None:
    """Let a parser take vLLM's flags too, without a word in its help. `ours` are the names of our settings."""
    for flag in foreign(ours):
        names = (f"--{flag.name}", *flag.short)
        dest = _DEST + flag.name
        if flag.takes == "switch":
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, dest=dest, help=argparse.SUPPRESS)
        elif flag.takes == "values":
            parser.add_argument(*names, nargs="+", action="extend", dest=dest, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*names, dest=dest, help=argparse.SUPPRESS)


def foreign(ours: Collection[str]) -> list[VllmFlag]:
    """The flags of the table that are no settings of ours by their own name."""
    return [flag for flag in FLAGS if flag.name.replace("-", "_") not in ours]


def names_of_vllm() -> list[str]:
    """All names in the table, with underscores."""
    return [flag.name.replace("-", "_") for flag in FLAGS]


def translate(given: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The settings that parsed flags stand for, with vLLM's replaced, and notes on those that change nothing.

    Raises SettingsError with one line for each flag that cannot be taken.
    """
    table = {_DEST + flag.name: flag for flag in FLAGS}
    settings = {name: value for name, value in given.items() if name not in table}
    notes: list[str] = []
    problems: list[str] = []
    for name, value in given.items():
        if name not in table:
            continue
        flag = table[name]
        words = _words(flag, value)
        if not _is_taken(flag, words):
            problems.append(_refusal(flag, words))
        elif flag.only:
            continue  # it says what is so
        elif not flag.setting:
            notes.append(f"{_spelling(flag, words)} changes nothing here: {flag.text}")
        else:
            _set(settings, flag, value, words)
    if problems:
        raise SettingsError(*problems)
    return settings, notes


def read_settings_file(path: Path, ours: Collection[str]) -> tuple[dict[str, object], list[str]]:
    """The same for the keys of a configuration file. Raises SettingsError."""
    theirs = {flag.name.replace("-", "_"): flag for flag in foreign(ours)}
    values = read_config(path, lambda key: key in ours or key in theirs, ours)
    try:
        return translate({_DEST + theirs[key].name if key in theirs else key: value for key, value in values.items()})
    except SettingsError as error:
        raise SettingsError(*(f"--config {path}: {line.removeprefix('--')}" for line in error.lines)) from None


def flags_text(ours: Collection[str], width: int) -> str:
    """What `quire serve --help vllm` prints."""
    lines = [
        "What happens here to the flags of `vllm serve`. Those that are settings here under the same name are in",
        "`quire serve --help`; these are the others. JSON flags may be given in their dotted form.",
        "",
    ]
    for flag in sorted(foreign(ours), key=lambda flag: flag.name):
        names = ", ".join((f"--{flag.name}", *flag.short))
        first, *rest = wrap(_fate(flag), max(30, width - 38))
        lines += [f"{names:<37} {first}" if len(names) < 37 else f"{names}\n{'':<37} {first}"]
        lines += [f"{'':<37} {line}" for line in rest]
    return "\n".join(lines)


def _fate(flag: VllmFlag) -> str:
    if flag.refused:
        return f"refused: {flag.text}"
    if flag.setting:
        becomes = f"is --{flag.setting.replace('_', '-')}"
        return f"{becomes}; {flag.text}" if flag.text else becomes
    if flag.only:
        return f"only {' or '.join(flag.only)}: {flag.text}"
    return f"taken, changes nothing: {flag.text}"


def _words(flag: VllmFlag, value: object) -> list[str]:
    """The value as the table writes it: `off`, or the parts of a list however it was written."""
    if isinstance(value, bool):
        return ["on" if value else "off"]
    if isinstance(value, list):
        return [str(part) for part in value]
    text = json.dumps(value) if isinstance(value, dict) else str(value).strip()
    if flag.takes == "json":
        try:
            decoded = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(decoded, list):
            return [str(part) for part in decoded]
        return [json.dumps(decoded)] if isinstance(decoded, dict) else [str(decoded)]
    return [part.strip() for part in text.split(",")] if flag.only else [text]


def _is_taken(flag: VllmFlag, words: Sequence[str]) -> bool:
    if flag.refused:
        return False
    return not flag.only or all(word in flag.only for word in words)


def _refusal(flag: VllmFlag, words: Sequence[str]) -> str:
    if flag.refused or flag.takes == "switch":
        return f"{_spelling(flag, words)}: refused: {flag.text}"
    return f"{_spelling(flag, words)}: only {' or '.join(flag.only)} is taken: {flag.text}"


def _spelling(flag: VllmFlag, words: Sequence[str]) -> str:
    """The flag as it may have been typed; a value may be a secret, so only those that the table knows are shown."""
    if flag.takes == "switch":
        return f"--{flag.name}" if words == ["on"] else f"--no-{flag.name}"
    shown = " ".join(words)[:40]
    return f"--{flag.name} {shown}" if flag.only else f"--{flag.name}"


def _set(settings: dict[str, object], flag: VllmFlag, value: object, words: Sequence[str]) -> None:
    """Our own flag wins where both are given."""
    becomes = flag.values.get(words[0], value)
    if becomes is not None:
        settings.setdefault(flag.setting, becomes)


# Variables of vLLM that operators set, and what does here what they do there. VLLM_API_KEY is taken as it is.
_VARIABLES: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_CONFIGURE_LOGGING": "--log-level and --log-format",
    "VLLM_LOGGING_CONFIG_PATH": "--log-level and --log-format",
    "VLLM_LOG_STATS_INTERVAL": "--log-stats-interval",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--timeout-keep-alive",
    "VLLM_ATTENTION_BACKEND": "--attention",
    "VLLM_BATCH_INVARIANT": "--deterministic",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-memory",
    "VLLM_CPU_OMP_THREADS_BIND": "--num-threads",
    "VLLM_TARGET_DEVICE": "--device",
    "VLLM_CACHE_ROOT": "--download-dir",
}
# Those that change nothing here: who is told, how processes start, which engine.
_HARMLESS = re.compile(
    r"VLLM_(NO_USAGE_STATS|DO_NOT_TRACK|USAGE_.*|USE_V1|WORKER_MULTIPROC_METHOD|API_KEY|DEBUG_LOG_API_SERVER_RESPONSE"
    r"|ENGINE_READY_TIMEOUT_S|SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*|RAY_.*|NCCL_.*|DP_.*|VERSION)"
)


def variable_warnings(names: Collection[str]) -> list[str]:
    """A line for each variable of vLLM that has a setting here, and one for all others that set nothing."""
    found = sorted(name for name in names if name.startswith("VLLM_") and not _HARMLESS.fullmatch(name))
    lines = [f"{name} sets nothing here; use {_VARIABLES[name]}" for name in found if name in _VARIABLES]
    others = [name for name in found if name not in _VARIABLES]
    if others:
        shown = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        lines.append(f"variables of vLLM that set nothing here: {shown}")
    return lines
