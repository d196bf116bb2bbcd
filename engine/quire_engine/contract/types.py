"""The engine's boundary: every type that crosses between the server and the engine.

Promises: frozen, plain values (ints, floats, strings, tuples) that msgspec can encode. Must not know: torch, asyncio,
HTTP, text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, get_args

FinishReason = Literal["stop", "length", "abort", "error"]
HoldReason = Literal["client", "adapters"]  # its client does not read; requests for other adapters have their turn
WaitReason = Literal["kv", "slots", "budget", "prefix"]  # prefix: another request is computing a common prefix
WAIT_REASONS: tuple[WaitReason, ...] = ("kv", "slots", "budget", "prefix")
# The beneficiary of a preemption: a running group that grows, the elder, an interactive group; or the device, which had
# no memory to compute the group.
PreemptionCause = Literal["blocks", "elder", "class", "share", "device"]
PREEMPTION_CAUSES: tuple[PreemptionCause, ...] = get_args(PreemptionCause)
# Why a slice of a step has no drafts: too many rows in the step; not a decode, or of a request that takes none; others
# were looked at in this step; nothing was found; it would not pay; or there was no free block.
NoDraftCause = Literal["batch", "request", "turn", "nothing", "cost", "blocks"]
NO_DRAFT_CAUSES: tuple[NoDraftCause, ...] = get_args(NoDraftCause)
# What happens to KV blocks between engines. Missed: a peer did not send them while their request waited; refused: they
# were damaged on their way.
TransferEvent = Literal["sent", "received", "missed", "refused"]
TRANSFER_EVENTS: tuple[TransferEvent, ...] = get_args(TransferEvent)
# The beginnings of errors that a request's own rules cause, such as a grammar that allows no token.
NO_CANDIDATE = "no token is left to choose from"
OF_THE_REQUEST = (NO_CANDIDATE, "the grammar ")
NON_FINITE = "the model produced a non-finite value"  # the error's text
# The beginning of a request's error if it made a step raise, even alone. It would do so again: the server refuses the
# same request for a while.
MODEL_FAILED = "the model failed on this request"
ServiceClass = Literal["interactive", "batch"]
DEADLINE_EXCEEDED = "deadline_exceeded"  # an `error_code`, with the error below
DEADLINE_PASSED = "the request was not finished by its deadline"
# An operator's orders to the engine.
RESET_PREFIX_CACHE = "reset_prefix_cache"
PACE = "pace"  # of an engine that may be paused: when its steps begin
LOAD_ADAPTER = "load_adapter"
FORGET_ADAPTER = "forget_adapter"
NAME_MODEL = "name_model"  # of the model's files on all machines, which engines that pass KV blocks on must share
Pooling = Literal["", "last", "mean"]  # the prompt tokens that make up its vector; empty: no vector


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingParams:
    """The limit on a choice's thinking: a block of its output that is ended when it is too long.

    The block begins with `start_ids`, or is open at the end of the prompt (`is_open`). After `max_tokens` tokens inside
    of it, `end_ids` are forced one by one. Whether a token is inside of the block follows from the output's tokens
    alone.
    """

    end_ids: tuple[int, ...]
    start_ids: tuple[int, ...] = ()
    is_open: bool = False
    max_tokens: int


MAX_LOGPROBS = 256  # of `num_logprobs` and `num_prompt_logprobs`: they stand in the frames of every step


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one token is chosen from a row of logits. Resolved and validated by the server.

    The draw for a token depends only on (seed, choice index, position), so that a preempted, resumed
    or re-batched request samples the same tokens.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # any signed 64-bit value
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # two or more ids each: the last one is masked after the others
    min_tokens: int = 0  # stop token ids are masked before this many generated tokens
    grammar: str = ""  # Lark text of llguidance, which the whole output obeys; empty: none
    # With a grammar: the token that opens thoughts. It may be the first one only if it is chosen without the grammar's
    # mask; else the probability of all that the grammar forbids would fall on it. None: no such token.
    thinking_opener: int | None = None
    thinking: ThinkingParams | None = None
    num_logprobs: int | None = None  # None: none; k: the chosen token and the k most likely
    logprob_token_ids: tuple[int, ...] = ()  # with num_logprobs: also scored, whatever their rank
    num_prompt_logprobs: int | None = None  # same as num_logprobs, for prompt tokens; disables prefix-cache reads

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_output(self) -> bool:
        """Whether the choice of a token depends on earlier output tokens: then the host must know all of them."""
        return self.has_penalties or bool(self.banned_sequences or self.grammar) or self.thinking is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """The conditions that end a sequence inside the engine. Stop strings stay in the server."""

    max_new_tokens: int  # 0: compute the prompt only
    stop_token_ids: tuple[int, ...] = ()  # EOS included unless the client ignores it


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search instead of sampling; scores are those of transformers' `generate`.

    A finished beam's score is the sum of its tokens' log-probabilities, divided by its length ** length_penalty.
    """

    width: int  # live beams
    length_penalty: float = 1.0  # above 0 longer beams are worth more, below 0 less
    # When to end with `width` finished beams. True: at once; False: when the best live beam would score below the worst
    # finished one if it ended now; "never": when it could not exceed that score at any length up to the maximum.
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that a request is bound to: these very weights, whatever lies in the directory later."""

    name: str  # as clients ask for it
    path: str  # its directory
    digest: str  # SHA-256 of its files, in hexadecimal digits


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """The facts of an adapter's files."""

    digest: str  # as `Adapter.digest`
    rank: int  # the largest of its matrices


class AdaptersInUse(NamedTuple):
    """Digests of the adapters of unfinished requests."""

    active: Collection[str]  # of those that run or wait for their steps
    held: Collection[str]  # of those that are set aside


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Another engine that has KV blocks of a request's prompt, or is about to compute them."""

    address: str  # HOST:PORT where it lends them
    is_computing: bool = False  # blocks that are not there yet will come
    own_seconds: float = 0.0  # predicted until the first token if all of the prompt is computed here


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and n choices of continuation; with `beam` the n best hypotheses of a beam search."""

    request_id: str  # internal and random, never the client's
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    n: int = 1
    arrival_time: float = 0.0  # seconds, monotonic clock
    priority: int = 0  # lower is earlier; read by the priority policy only
    # Requests with different salts never share cached blocks; "scope\0salt", or without a scope. With an adapter its
    # digest stands at the end, behind "\1", see `bound_to`.
    cache_salt: str = ""
    cache_ttl: float = 0.0  # seconds from its end for which its prompt's cached blocks are pinned; 0: they are not
    resumed_token_ids: tuple[tuple[int, ...], ...] = ()  # crash recovery: per choice, tokens already sent
    finished_choices: tuple[int, ...] = ()  # crash recovery: choices that already ended
    pooling: Pooling = ""  # for an embedding of the prompt: max_new_tokens is 0, n is 1
    tenant: str = ""  # the tenant that its service is charged to
    weight: float = 1.0  # the tenant's weight under fair queueing: twice the weight, twice the service
    max_running: int = 0  # the tenant's quota of running sequences; 0: any number
    service_elsewhere: float = 0.0  # the tenant's service by other replicas so far, as its front knows it
    service_class: ServiceClass = "interactive"
    deadline: float | None = None  # on the clock of arrival_time; unfinished then, it ends with an error
    beam: BeamParams | None = None  # beam search instead of sampling; outputs come at its end
    tells_progress: bool = False  # a step that computes a part of its prompt, but not the last one, has an output
    speculates: bool = True  # guessed tokens may be computed for it, where the engine does that
    prediction: tuple[int, ...] = ()  # the client's own guess of the answer, for such guesses
    adapter: Adapter | None = None  # None: the model's own weights alone
    kv_source: KVSource | None = None  # fetch blocks of its prompt there, as long as that is no slower

    def bound_to(self, adapter: Adapter | None) -> GenerationRequest:
        """The request with this adapter, whose blocks no request with another adapter, or without one, can share."""
        if adapter is None:
            return self
        return replace(self, adapter=adapter, cache_salt=f"{self.cache_salt}\1{adapter.digest}")

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed in parallel: one per choice, or one per live beam."""
        return self.n if self.beam is None else self.beam.width

    @property
    def cache_scope(self) -> str:
        """The tenant, group or key that the cached prefixes belong to, as the API names it; empty without keys."""
        return self.cache_salt.partition("\0")[0] if "\0" in self.cache_salt else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural log) of one position, from the raw logits."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: tuple[int, ...] = ()  # most likely first
    top_logprobs: tuple[float, ...] = ()
    asked_ids: tuple[int, ...] = ()  # `logprob_token_ids` of the request
    asked_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """A sequence's time in seconds on the engine's clock. Sent with its first and last output."""

    queue_seconds: float  # arrival to first scheduled
    kv_wait_seconds: float  # time at the queue's head waiting for KV blocks, also after preemptions
    prefill_seconds: float  # first scheduled to first token
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """How far a prompt is computed before its request's first token."""

    num_computed: int  # prompt tokens, with those served from the prefix cache
    seconds: float  # since the request was first scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """New tokens of one choice of one request; `finish` is set exactly once per choice."""

    request_id: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # the whole prompt; the first is None
    beam_score: float | None = None  # score of a beam search hypothesis
    embedding: tuple[float, ...] | None = None  # with pooling: the pooled rows after the final norm, not normalised
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended the choice (also the last of token_ids)
    error: str | None = None  # with finish == "error": one line, safe to show to the client
    error_code: str = ""  # with error: DEADLINE_EXCEEDED, or empty
    culprit: bool = False  # with error: the request is the cause and would fail again
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    timing: RequestTiming | None = None
    predicted: tuple[int, int] | None = (
        None  # with a prediction: guessed tokens of this step, and those that were right
    )
    progress: PromptProgress | None = None  # in an output that tells this and brings no token


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """One tenant's sequences in the engine, and its service since the engine started."""

    tenant: str
    running: int = 0  # sequences
    waiting: int = 0  # sequences
    total_prompt_tokens: int = 0  # computed prompt tokens, without cached ones and recomputations
    total_output_tokens: int = 0
    total_service: float = 0.0  # prompt tokens plus twice the output tokens


PinEvent = Literal["pinned", "refused", "expired", "evicted"]


FREE_RUN_BOUNDS = tuple([1 << power for power in range(21)])  # blocks
UNUSED_SLOT_BOUNDS = (0, *(1 << power for power in range(9)))  # token slots


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step. Gauges are the state of this moment; `total_*` count since the engine started."""

    running: int = 0  # sequences
    waiting: dict[WaitReason, int] = field(default_factory=dict)  # sequences
    held: int = 0  # sequences, set aside until they are released
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0  # matchable but not referenced
    blocks_free: int = 0
    blocks_pinned: int = 0  # used or cached, of prefixes that are kept for a time
    blocks_shared: int = 0  # used blocks held by two or more sequences
    blocks_unshared: int = 0  # used blocks held by one sequence
    blocks_saved: int = 0  # blocks that sharing saves
    slots_allocated: int = 0  # token slots in used blocks
    slots_unused: int = 0  # allocated token slots without a token (internal fragmentation)
    prefill_tokens: int = 0  # this step
    decode_tokens: int = 0  # this step
    step_seconds: float = 0.0  # this step, whole
    host_seconds: float = 0.0  # this step, without the model
    step_rows: int = 0  # this step: tokens computed, the guessed ones among them
    seen_seconds: float = 0.0  # this step, from its plan, or from the end of the step before it, to its results
    predicted_seconds: float = 0.0  # of those, by the steps before it; 0: not known, or not predicted
    total_busy_seconds: float = 0.0  # in steps, whole, with the sending of their outputs
    total_free_runs: tuple[int, ...] = ()  # of samples: runs of blocks that no sequence holds, by `FREE_RUN_BOUNDS`
    total_free_run_blocks: int = 0  # in those runs
    total_unused_slots: tuple[int, ...] = ()  # of the same samples: sequences, by `UNUSED_SLOT_BOUNDS`
    total_unused_slots_sum: int = 0  # token slots without a token in their blocks
    total_preemptions: int = 0
    total_prefix_query_tokens: int = 0
    total_prefix_hit_tokens: int = 0
    total_kv_evictions: int = 0  # cached blocks whose content was dropped for reuse
    total_pins: dict[PinEvent, int] = field(default_factory=dict)  # blocks
    total_blocks_taken: int = 0  # allocations of blocks, evicted ones included
    kv_waiting_since: float | None = None  # clock of arrival_time: when the queue's head began to wait for blocks
    total_kv_wait_seconds: float = 0.0  # time in which the queue's head waited for blocks
    total_padding_rows: int = 0  # rows that pad steps to one of few sizes
    total_rank_seconds: tuple[float, ...] = ()  # that each rank has waited for the others' columns; empty without ranks
    tenants: tuple[TenantStats, ...] = ()  # empty until a request names a tenant
    total_prefill_tokens_saved: int = 0  # cached tokens of requests that entered, also after preemptions
    host_blocks_total: int = 0  # blocks of host memory for swapped sequences and evicted prefixes
    host_blocks_used: int = 0  # host blocks claimed by swapped sequences
    host_blocks_cached: int = 0  # host blocks cached without a claim
    total_swapped_out_blocks: int = 0
    total_swapped_in_blocks: int = 0
    kept_blocks: int = 0  # prefix blocks in files that outlive the process, beside a pool in host memory
    total_kept_written: int = 0  # blocks
    total_kept_read: int = 0
    total_kept_dropped: int = 0  # not written: too many waited, the pool took their place, all others are newer
    total_kept_refused: int = 0  # damaged or foreign files
    leased_blocks: int = 0  # that other engines have asked for and that are not sent yet
    total_transfers: dict[TransferEvent, int] = field(default_factory=dict)  # KV blocks between engines
    total_transfer_bytes: dict[Literal["sent", "received"], int] = field(default_factory=dict)
    total_transfer_wait_seconds: float = 0.0  # that requests have waited for blocks of other engines
    late_peers: frozenset[str] = frozenset()  # addresses of engines from which none are fetched for now
    total_preemptions_by_mode: dict[Literal["recompute", "swap"], int] = field(default_factory=dict)
    total_recomputed_tokens: int = 0  # computed once more, since a preemption had lost their KV blocks
    total_preemptions_by_cause: dict[PreemptionCause, int] = field(default_factory=dict)
    total_drafts: int = 0  # decodes with drafts
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0  # of the drafts
    total_accepted_by_position: tuple[int, ...] = ()  # of those: the first drafts of their decodes, the second, ...
    total_undrafted: dict[NoDraftCause, int] = field(default_factory=dict)  # slices of steps
    running_adapters: frozenset[str] = frozenset()  # names of the adapters of running requests
    waiting_adapters: frozenset[str] = frozenset()  # and of others that are unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChanges:
    """Changes of a replica's cached prompt blocks since the frame before, for a router's index.

    A block is named by the first 8 bytes of its hash; `block_hashes.short_name`.
    """

    number: int  # 1 for an engine's first frame, then one more for each: a gap means that frames were lost
    registered: tuple[int, ...] = ()  # can be matched now
    depths: tuple[int, ...] = ()  # of each of them: blocks before it in its prompt
    forgotten: tuple[int, ...] = ()  # cannot be matched any more


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """Full blocks of one chain that can be matched from now on or, without tokens, that cannot any more.

    A block is named as in `PrefixChanges`.
    """

    blocks: tuple[int, ...]
    token_ids: tuple[int, ...] = ()  # of all of them; empty: they are forgotten
    parent: int | None = None  # the block before the first one; None: it begins a prompt
    group: int = 0  # of layers
    salt: str = ""  # that their names depend on
    adapter: str = ""  # its name


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The outputs and statistics of one engine step. Also sent without outputs when an abort changed the statistics."""

    step_id: int
    outputs: tuple[TokenOutput, ...]
    stats: EngineStats
    prefixes: PrefixChanges | None = None  # where a router asked for them and there were some
    cache_events: tuple[CacheEvent, ...] = ()  # in order, where they are published


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The content of a heartbeat. A step counter that does not move while there is work means a hang."""

    alive: bool
    step_id: int
    has_work: bool


class EnginePort(Protocol):
    """The methods by which everything talks to an engine, in this process or in a child.

    `submit` never blocks and never raises for request data that passed the server's validation: what the
    scheduler refuses comes back as a TokenOutput with finish == "error". `on_step` is set once by the owner
    before the first submit and is called on the owner's thread or event loop.
    `hold_request` suspends a live request until `release_request`: no step computes it, and it has no blocks.
    """

    on_step: Callable[[StepOutput], None]

    def submit(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def hold_request(self, request_id: str) -> None: ...
    def release_request(self, request_id: str) -> None: ...
    def health(self) -> EngineHealth: ...
