"""Scripts with which bash, zsh and fish complete the words of `quire`.

Promises: a script that needs nothing but its shell, and in which every word is quoted, so that no help text can run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SHOWN = 72  # characters of a flag's help
_OF_FILES = {"PATH", "FILE", "DIR"}  # names of values that are files or folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a command."""

    names: tuple[str, ...]  # with their hyphens, each of which means the same
    help: str  # one short line
    takes_value: bool
    values: tuple[str, ...]  # all that there are; empty: any
    is_file: bool  # the value names a file or a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]  # of its first argument; empty: a file or a folder


def flags_of(parser: argparse.ArgumentParser) -> tuple[Flag, ...]:
    """The flags that a parser's help shows, `--no-x` of a switch as a flag of its own."""
    found: list[Flag] = []
    for action in parser._actions:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        text = _short(str(action.help or ""))
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        groups = [(name,) for name in action.option_strings] if is_switch else [tuple(action.option_strings)]
        found += [
            Flag(
                names=names,
                help=text,
                takes_value=action.nargs != 0,
                values=tuple(map(str, action.choices or ())),
                is_file=action.type is Path or str(action.metavar) in _OF_FILES,
            )
            for names in groups
        ]
    return tuple(found)


def _short(text: str) -> str:
    """The first clause of a help text, without what it says of the default."""
    first = re.split(r"; | \[|\. |: ", " ".join(text.replace("%%", "%").split()))[0]
    return first if len(first) <= _SHOWN else first[: _SHOWN - 3].rsplit(" ", 1)[0] + "..."


def _quoted(text: str) -> str:
    """A word of bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _patterns(flags: Iterable[Flag]) -> str:
    return "|".join(name for flag in flags for name in flag.names)


def bash(commands: Sequence[Command]) -> str:
    """Return the completion script for bash 4 or newer; it does not need bash-completion."""
    lines = [
        "# bash completion for quire: source <(quire completion bash)",
        "_quire() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} values= flags= words= files=",
        "    # Bash makes a word of its own of the equals sign in --flag=value.",
        '    if [[ $word == "=" ]]; then',
        "        word=",
        '    elif [[ $before == "=" ]]; then',
        "        before=${COMP_WORDS[COMP_CWORD-2]}",
        "    fi",
        "    COMPREPLY=()",
        "    if (( COMP_CWORD == 1 )); then",
        f'        mapfile -t COMPREPLY < <(compgen -W {_quoted(" ".join(each.name for each in commands))} -- "$word")',
        "        return",
        "    fi",
        "    case ${COMP_WORDS[1]} in",
    ]
    for command in commands:
        lines += [f"    {command.name})", *(f"        {line}" for line in _bash_command(command)), "        ;;"]
    lines += [
        "    esac",
        "    if [[ -n $files ]]; then",
        '        mapfile -t COMPREPLY < <(compgen -f -- "$word")',
        "        compopt -o filenames 2>/dev/null",
        "    elif [[ -n $values ]]; then",
        '        [[ $values == " " ]] || mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")',
        "    elif [[ $word == -* ]]; then",
        '        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word")',
        "    elif [[ -n $words ]]; then",
        '        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")',
        "    else",
        '        mapfile -t COMPREPLY < <(compgen -f -- "$word")',
        "        compopt -o filenames 2>/dev/null",
        "    fi",
        "    return 0",
        "}",
        "complete -F _quire quire",
    ]
    return "\n".join(lines) + "\n"


def _bash_command(command: Command) -> list[str]:
    names = " ".join(name for flag in command.flags for name in flag.names)
    lines = [f"flags={_quoted(names)}"]
    if command.words:
        lines.append(f"(( COMP_CWORD == 2 )) && words={_quoted(' '.join(command.words))}")
    lines.append("case $before in")
    files = [flag for flag in command.flags if flag.is_file]
    others = [flag for flag in command.flags if flag.takes_value and not flag.is_file and not flag.values]
    lines += [
        f"    {_patterns([flag])}) values={_quoted(' '.join(flag.values))} ;;" for flag in command.flags if flag.values
    ]
    lines += [f"    {_patterns(files)}) files=yes ;;"] if files else []
    lines += [f"    {_patterns(others)}) values=' ' ;;"] if others else []  # any value: nothing to propose
    return [*lines, "esac"]


def zsh(commands: Sequence[Command]) -> str:
    """Return the completion script for zsh with compinit; a file that holds it must be named _quire."""
    named = " ".join(_quoted(f"{_zsh_text(each.name)}:{each.help}") for each in commands)
    lines = [
        "#compdef quire",
        "# zsh completion for quire: source <(quire completion zsh)",
        "_quire() {",
        f"    local -a commands=({named})",
        "    if (( CURRENT == 2 )); then",
        "        _describe -t commands 'command of quire' commands",
        "        return",
        "    fi",
        "    local command=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $command in",
    ]
    for command in commands:
        specs = [spec for flag in command.flags for spec in _zsh_specs(flag)]
        first = f"'1:argument:({' '.join(command.words)})'" if command.words else "'*:file:_files'"
        lines += [
            f"    {command.name})",
            "        _arguments -S : \\",
            *(f"            {spec} \\" for spec in specs),
            f"            {first}",
            "        ;;",
        ]
    return "\n".join([*lines, "    esac", "}", "compdef _quire quire"]) + "\n"


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _zsh_specs(flag: Flag) -> list[str]:
    value = f"({' '.join(flag.values)})" if flag.values else "_files" if flag.is_file else " "
    return [
        _quoted(
            f"*{name}{'=' if flag.takes_value and name.startswith('--') else ''}[{_zsh_text(flag.help)}]"
            + (f":value:{value}" if flag.takes_value else "")
        )
        for name in flag.names
    ]


def fish(commands: Sequence[Command]) -> str:
    """Return the completion script for fish 3 or newer."""
    lines = [
        "# fish completion for quire: quire completion fish | source",
        "function __quire_is",
        "    set -l given (commandline -opc)",
        "    test (count $given) -ge 2; and test $given[2] = $argv[1]",
        "end",
        "complete -c quire -f -n 'test (count (commandline -opc)) -eq 1'",
    ]
    for command in commands:
        lines.append(
            "complete -c quire -n 'test (count (commandline -opc)) -eq 1'"
            f" -a {_fish_quoted(command.name)} -d {_fish_quoted(command.help)}"
        )
    for command in commands:
        on = f"complete -c quire -n '__quire_is {command.name}'"
        if command.words:
            lines.append(f"{on} -f -a {_fish_quoted(' '.join(command.words))}")
        for flag in command.flags:
            kinds = "".join(
                f" -l {name.removeprefix('--')}" if name.startswith("--") else f" -s {name.removeprefix('-')}"
                for name in flag.names
            )
            value = " -r" if flag.is_file else " -x" if flag.takes_value else ""
            listed = f" -a {_fish_quoted(' '.join(flag.values))}" if flag.values else ""
            lines.append(f"{on}{kinds}{value}{listed} -d {_fish_quoted(flag.help)}")
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
