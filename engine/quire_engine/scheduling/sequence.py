"""What the scheduler knows about a live request: a group, and one sequence per unfinished choice.

Promises: plain mutable records; only the scheduler (and the allocator, for blocks) writes to them.
Must not know: torch, the block pool, the policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire_engine.scheduling.page_table import PageTable
from quire_engine.types import GenerationRequest, TokenLogprobs, WaitReason

GroupState = Literal["waiting", "running", "preempted", "finished"]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice: its tokens, how many of them are computed, and the blocks that hold those."""

    sequence_id: int
    choice: int
    group: Group
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    table: PageTable
    num_computed: int = 0
    num_reserved: int = 0  # tokens that its blocks were taken for
    block_hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as needed yet
    num_committed: int = 0  # leading blocks already offered to the prefix cache
    shares_tail: bool = False  # its last block may be a sibling's too: look before the next write
    has_output: bool = False  # its first output was sent in this engine's life

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def blocks_for_known(self) -> int:
        """Blocks that hold every token known now."""
        return self.table.num_blocks_for(len(self.token_ids))


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """One request: the unit of admission, preemption and waiting."""

    request: GenerationRequest
    arrival: int  # position in the order of submission; kept for life
    added_step: int
    stop_token_ids: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)  # unfinished choices
    computing: list[Sequence] = field(default_factory=list)  # of those, the ones that get slices now
    prompt_shared: bool = True  # False: the leader computes the prompt, the others wait for its blocks
    state: GroupState = "waiting"
    work: int = 0  # steps it needs at most as the elder
    wait_bound: int = 0  # steps from submission to its end, at most
    num_bypasses: int = 0
    wait_reason: WaitReason = "budget"
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    kv_wait_seconds: float = 0.0
    prompt_logprobs_due: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_new_tokens(self) -> int:
        return self.request.stop.max_new_tokens

    @property
    def reads_cache(self) -> bool:
        """Scores of the prompt need every row of it computed."""
        return self.request.sampling.num_prompt_logprobs is None

    def target(self, sequence: Sequence) -> int:
        """Tokens of a computing sequence that can be computed now.

        The leader stops at the end of the prompt while others wait for it, so that they share whole blocks of
        prompt and nothing else.
        """
        return len(sequence.token_ids) if self.prompt_shared else sequence.num_prompt_tokens

    def pending(self, sequence: Sequence) -> int:
        """Tokens of a computing sequence that are known and not computed; 1 is a decode."""
        return self.target(sequence) - sequence.num_computed

    def elect_leader(self) -> Sequence:
        """Start (again) from nothing computed: one sequence computes the prompt for all.

        A choice without output leads if there is one: the token after the prompt is then sampled from the
        leader's last row for every such choice at once, and the others join behind the prompt.
        """
        leader = next((s for s in self.sequences if s.num_output_tokens == 0), self.sequences[0])
        self.computing = [leader]
        self.prompt_shared = len(self.sequences) == 1
        return leader

    def followers(self) -> list[Sequence]:
        """The sequences that wait for the leader's prompt."""
        return [] if self.prompt_shared else [s for s in self.sequences if s is not self.computing[0]]

    def share_prompt(self) -> None:
        """From now on every unfinished choice computes."""
        self.computing = list(self.sequences)
        self.prompt_shared = True

    @property
    def is_prefilling(self) -> bool:
        """Between steps: in the middle of its known tokens."""
        return not self.prompt_shared or any(self.pending(s) > 1 for s in self.computing)

    def blocks_beside_leader(self, leader: Sequence) -> int:
        """Blocks that the other choices need for their known tokens, beyond the prompt's full blocks."""
        shared = self.num_prompt_tokens // leader.table.block_size
        return sum(s.blocks_for_known - shared for s in self.sequences if s is not leader)
