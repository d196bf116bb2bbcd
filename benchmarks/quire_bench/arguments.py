"""The command line of `quire bench`, checked.

Promises: an `Asked` that exists can be tried; what cannot is one readable line.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar

from quire_bench.baselines import BASELINES
from quire_bench.llama_bench import is_program
from quire_bench.servers import BenchError, Peer
from quire_bench.traces import TraceError, read_trace
from quire_bench.workload import OPEN_LOOP_SECONDS, LoadPoint, Mode, Span, Workload

_EPILOG = f"""\
Without --url, `quire serve` is started on a free port with the flags after --, and stopped at the end.

Closed loop (--concurrency): so many streams, each sends its next request when its last has ended; by default
four requests per stream. Open loop (--rate, --trace): requests are sent when they are due, whatever became of
the others; by default {OPEN_LOOP_SECONDS:g} s of arrivals. Prompts are random token ids; they and the answers have
exact lengths (ignore_eos). All servers get the same requests, in turns: A B A B; ratios are taken pair by pair.

examples:
  quire bench                                                the embedded model, one and eight streams
  quire bench --concurrency 1,2,4,8,16,32 --plot sweep.png -- /models/Qwen3-0.6B
  quire bench --url http://127.0.0.1:8000 --against http://127.0.0.1:8001,vllm --input 128 --output 64
  quire bench --rate 1,2,4,8 --seconds 60 --output 16-256 --json rates.json
  quire bench --trace AzureLLMInferenceTrace_conv.csv --scale-rate 0.1 --scale-len 0.25 --requests 200
  quire bench --concurrency 8 --output log:8-1024 --baseline static --baseline hf-generate"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request of a command line: what to measure, on which servers, and what to write."""

    url: Peer | None  # None: a server of our own
    serve_flags: tuple[str, ...]
    against: tuple[Peer, ...]
    baselines: tuple[str, ...]
    checkpoint: str | None  # of the baselines, when the server is not our own
    points: tuple[LoadPoint, ...]
    workload: Workload  # its vocabulary is the server's unless `vocab` says otherwise
    vocab: int | None
    model: str | None
    temperature: float
    token_ids: bool
    api_key: str | None
    repeat: int
    warmup: int | None
    timeout: float
    probe: bool
    json: Path | None
    plot: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchError(message)


def parse_arguments(argv: Sequence[str]) -> Asked:
    """Raises BenchError; `--help` exits 0."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    given = build_parser().parse_args(words[:split])
    asked = Asked(
        url=given.url,
        serve_flags=tuple(words[split + 1 :]),
        against=tuple(given.against),
        baselines=tuple(dict.fromkeys(given.baseline)),
        checkpoint=given.checkpoint,
        points=_points(given),
        workload=_workload(given),
        vocab=given.vocab,
        model=given.model,
        temperature=given.temperature,
        token_ids=given.token_ids,
        api_key=given.api_key,
        repeat=given.repeat,
        warmup=given.warmup,
        timeout=given.timeout,
        probe=given.probe,
        json=given.json,
        plot=given.plot,
    )
    _check(asked)
    return asked


def build_parser() -> argparse.ArgumentParser:
    """Flags by group; every one says its default."""
    parser = _Parser(
        prog="quire bench",
        usage="quire bench [flags] [-- flags of quire serve]",
        description="Put load on a server, or on several in turns, and say how fast they are.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=32, width=min(120, shutil.get_terminal_size().columns)
        ),
    )
    on = parser.add_argument_group("Servers")
    on.add_argument("--url", type=Peer.parse, metavar="URL[,NAME]", help="a running server; default: one of our own")
    on.add_argument(
        "--against",
        type=Peer.parse,
        action="append",
        default=[],
        metavar="URL[,NAME]",
        help="a peer, measured in turns; may be repeated; or the file of a program llama-bench, for one stream",
    )
    on.add_argument(
        "--baseline",
        choices=tuple(BASELINES),
        action="append",
        default=[],
        help="also static batches by transformers' generate, or by our engine; may be repeated",
    )
    on.add_argument(
        "--checkpoint", metavar="PATH", help="model of baselines and llama-bench, when the server is given by --url"
    )
    on.add_argument("--model", metavar="NAME", help="model to ask --url and our own server for [the first listed]")
    on.add_argument("--api-key", metavar="KEY", help="for --url or our own server; peers never get it")
    load = parser.add_argument_group("Load, one of")
    load.add_argument(
        "--concurrency", type=_list_of(_positive_int), metavar="N,N,...", help="closed loop: streams at once [1,8]"
    )
    load.add_argument(
        "--rate",
        type=_list_of(_positive_float),
        metavar="X,X,...",
        help="open loop: requests per second, Poisson arrivals",
    )
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="open loop: arrivals and lengths of an Azure CSV or a Mooncake jsonl"
    )
    load.add_argument(
        "--scale-rate", type=_list_of(_positive_float), metavar="X,X,...", help="a trace runs so many times faster [1]"
    )
    load.add_argument(
        "--scale-len", type=_positive_float, default=1.0, metavar="X", help="a trace's lengths times this [1]"
    )
    sent = parser.add_argument_group("Requests")
    sent.add_argument(
        "--input",
        type=_span,
        default="128",
        metavar="N|LO-HI|log:LO-HI",
        help="prompt tokens, without the prefix [128]",
    )
    sent.add_argument(
        "--output",
        type=_span,
        default="64",
        metavar="N|LO-HI|log:LO-HI",
        help="tokens to generate; log: many short answers and a few long ones [64]",
    )
    sent.add_argument(
        "--prefix", type=_count, default=0, metavar="N", help="tokens that all prompts of a round begin with [0]"
    )
    sent.add_argument("--requests", type=_positive_int, metavar="N", help="requests per load point and round")
    sent.add_argument("--seconds", type=_positive_float, metavar="S", help="no request starts later than this")
    sent.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]")
    sent.add_argument(
        "--vocab", type=_vocabulary, metavar="N", help="prompt ids are below this [the server's, or 1000]"
    )
    sent.add_argument(
        "--token-ids",
        action="store_true",
        help="ask for token ids in the chunks, so that tokens without text have one, too; for made-up vocabularies",
    )
    sent.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, ids and arrivals [0]")
    sent.add_argument(
        "--timeout", type=_positive_float, default=600.0, metavar="S", help="a request may take so long [600]"
    )
    how = parser.add_argument_group("Measuring")
    how.add_argument(
        "--repeat", type=_positive_int, default=5, metavar="N", help="rounds; medians and spread are over these [5]"
    )
    how.add_argument(
        "--warmup",
        type=_count,
        metavar="N",
        help="short requests to each server before the first round [as many as streams, at most 32]",
    )
    how.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure what the machine can do in each round [on]",
    )
    written = parser.add_argument_group("Results")
    written.add_argument(
        "--json", type=Path, metavar="FILE", help="write all numbers, with machine, versions and command"
    )
    written.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput and latency against load (PNG)")
    return parser


def _points(given: argparse.Namespace) -> tuple[LoadPoint, ...]:
    chosen = [name for name in ("concurrency", "rate", "trace") if getattr(given, name) is not None]
    if len(chosen) > 1:
        raise BenchError(f"--{chosen[0]} and --{chosen[1]} exclude each other; keep one")
    if given.trace is None and (given.scale_rate is not None or given.scale_len != 1.0):
        raise BenchError("--scale-rate and --scale-len are about a trace; add --trace FILE")
    if given.trace is not None:
        return _load_points("trace", given.scale_rate or [1.0])
    if given.rate is not None:
        return _load_points("rate", given.rate)
    return _load_points("concurrency", given.concurrency or [1, 8])


def _load_points(mode: Mode, values: Sequence[float]) -> tuple[LoadPoint, ...]:
    return tuple(LoadPoint(mode=mode, value=value) for value in dict.fromkeys(values))


def _workload(given: argparse.Namespace) -> Workload:
    try:
        trace = read_trace(given.trace, scale_length=given.scale_len) if given.trace is not None else ()
    except TraceError as error:
        raise BenchError(f"--trace: {error}") from None
    return Workload(
        input=given.input,
        output=given.output,
        prefix=given.prefix,
        seed=given.seed,
        requests=given.requests,
        seconds=given.seconds,
        trace=trace,
    )


def _check(asked: Asked) -> None:
    if asked.url is not None and asked.serve_flags:
        raise BenchError("flags after -- are for a server of our own; leave out --url or them")
    if any(flag.split("=")[0] == "--uds" for flag in asked.serve_flags):
        raise BenchError("a server of our own listens on a port; leave out --uds")
    if asked.baselines and asked.points[0].mode != "concurrency":
        raise BenchError("baselines compute batches, which have no arrivals; use --concurrency")
    if asked.baselines and asked.url is not None and asked.checkpoint is None:
        raise BenchError("--baseline needs the model that --url serves: add --checkpoint DIR")
    if any(is_program(peer.url) for peer in asked.against):
        if [(point.mode, point.value) for point in asked.points] != [("concurrency", 1)]:
            raise BenchError("llama-bench has one stream; use --concurrency 1")
        if asked.workload.requests is None and asked.workload.seconds is not None:
            raise BenchError("llama-bench computes a number of requests; use --requests and not --seconds alone")
        if asked.url is not None and asked.checkpoint is None:
            raise BenchError("llama-bench needs the GGUF file that --url serves: add --checkpoint FILE")
    if asked.plot is not None and find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install 'quire[bench]'")
    for path in (asked.json, asked.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{path} cannot be written: there is no such directory")


def _span(text: str) -> Span:
    try:
        return Span.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens such as 128, 64-256 or log:8-1024, got {text!r}") from None


def _positive_int(text: str) -> int:
    return _checked(text, int, lambda value: value > 0, "a whole number above 0")


def _count(text: str) -> int:
    return _checked(text, int, lambda value: value >= 0, "a whole number")


def _vocabulary(text: str) -> int:
    return _checked(text, int, lambda value: value >= 2, "a whole number above 1")


def _positive_float(text: str) -> float:
    return _checked(text, float, lambda value: 0 < value < float("inf"), "a number above 0")


def _checked(text: str, kind: Callable[[str], T], is_right: Callable[[T], bool], expected: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_right(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    return parse
