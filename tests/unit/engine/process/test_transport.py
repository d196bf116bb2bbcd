"""Frames: every type round-trips, cut anywhere; garbage is a ProtocolError."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ProtocolError
from quire_engine.contract.token_columns import Outputs, Stream, step_output
from quire_engine.contract.types import (
    EngineHealth,
    EngineStats,
    GenerationRequest,
    RequestTiming,
    SamplingParams,
    StepOutput,
    StopParams,
    ThinkingParams,
    TokenLogprobs,
    TokenOutput,
)
from quire_engine.process.transport import (
    MAX_FRAME_BYTES,
    Abort,
    Alive,
    Control,
    FrameDecoder,
    FrameEncoder,
    Hold,
    Inspect,
    Inspected,
    Kind,
    LoadProgress,
    Release,
    Shutdown,
    StartFailed,
    encode_frame,
)
from support.fake_engine_process import make_plan

LOGPROBS = TokenLogprobs(token_id=3, logprob=-0.1 - 1e-17, rank=1, top_ids=(3, 4), top_logprobs=(-0.1, -2.5))
FRAMES = [
    EngineConfig(model="/models/x", kv_memory=1 << 40),
    GenerationRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(
            temperature=0.7,
            seed=-(2**63),
            logit_bias=((5, -1.5),),
            grammar='start: "yes" | <[7]>',
            thinking=ThinkingParams(end_ids=(9, 10), start_ids=(8,), is_open=True, max_tokens=4),
            num_logprobs=2,
        ),
        stop=StopParams(max_new_tokens=8, stop_token_ids=(0,)),
        n=2,
        resumed_token_ids=((7,), ()),
        finished_choices=(1,),
    ),
    Abort(request_id="r"),
    Hold(request_id="r"),
    Release(request_id="r"),
    LoadProgress(phase="reading weights", done=1 << 33, total=1 << 34),
    Shutdown(),
    Alive(),
    Inspect(token=3, what="steps", argument='{"after":7}'),
    Inspected(token=3, body=b'{"steps":[]}\xff'),
    Control(token=4, what="reset_prefix_cache"),
    LoadProgress(phase="reading weights", done=3, total=1 << 40),
    make_plan(),
    StartFailed(kind="config", message="no"),
    LoadProgress(phase="reading weights", done=3, total=9),
    EngineHealth(alive=True, step_id=7, has_work=False),
    StepOutput(
        step_id=9,
        outputs=(
            TokenOutput(
                request_id="r",
                choice=1,
                token_ids=(3,),
                logprobs=(LOGPROBS,),
                prompt_logprobs=(None, LOGPROBS),
                finish="stop",
                stop_token_id=3,
                timing=RequestTiming(queue_seconds=0.1, kv_wait_seconds=0.0, prefill_seconds=0.2, num_preemptions=1),
            ),
        ),
        stats=EngineStats(running=1, waiting={"kv": 2, "slots": 0, "budget": 1}),
    ),
]


def test_every_kind_has_a_round_trip_here() -> None:
    assert len({type(frame) for frame in FRAMES}) == len(Kind)


@given(cuts=st.lists(st.integers(1, 400), max_size=30))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, FRAMES))
    decoder, received = FrameDecoder(), []
    for cut in [*cuts, len(stream)]:
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert received == FRAMES


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x01\x00\x00\x00\x63\x00",  # unknown kind
        b"\x02\x00\x00\x00\x07\xc1\xc1",  # not msgpack
        b"\x01\x00\x00\x00\x07\x80",  # a map that lacks the required fields
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"\x07",
    ],
)
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(garbage)


def test_random_bytes_never_raise_anything_else() -> None:
    for _ in range(200):
        try:
            FrameDecoder().feed(os.urandom(64))
        except ProtocolError:
            continue


def test_plain_tokens_come_as_outputs_in_their_order():
    """However many streams there are, and whatever comes between them; the streams come and go."""
    streams = [Stream(f"{i:032x}", i % 3, 16 * (i % 2)) for i in range(300)]
    encoder, decoder = FrameEncoder(), FrameDecoder()
    end = TokenOutput(request_id="e", token_ids=(5,), finish="stop", stop_token_id=5)
    for step, count in enumerate([1, 3, 3, 15, 16, 300, 299, 0]):
        some = tuple(streams[300 - count :])
        ids = [(1 << 31) + i if i % 2 else i + step for i in range(count)]
        packed = b"".join(token_id.to_bytes(4, "big") for token_id in ids)
        behind = (0, count // 2, count) if count else ()
        columns = Outputs(others=[end] * 3, streams=some, ids=packed, behind=behind)
        sent = step_output(columns, step_id=step, stats=EngineStats(running=count))
        (got,) = decoder.feed(encoder.encode(sent))
        assert decoder.feed(encode_frame(sent)) == [got]
        plain = [
            TokenOutput(request_id=s.request_id, choice=s.choice, token_ids=(i,), num_cached_tokens=s.num_cached_tokens)
            for s, i in zip(some, ids, strict=True)
        ]
        half = count // 2
        assert got.outputs == (end, *plain[:half], end, *plain[half:], end) == sent.outputs
        assert got == StepOutput(step_id=step, outputs=got.outputs, stats=EngineStats(running=count))


def test_earlier_outputs_come_before_those_in_columns():
    stream = Stream("a", 0, 0)
    one = Outputs(others=[], streams=(stream,), ids=(7).to_bytes(4, "big"))
    two = Outputs(others=[TokenOutput(request_id="a", token_ids=(8,), finish="length")])
    both = two.behind_others(one)
    assert [output.token_ids for output in both.every()] == [(7,), (8,)]
    again = one.behind_others(both)
    assert [output.token_ids for output in again.every()] == [(7,), (8,), (7,)]
    assert len(again) == 3
