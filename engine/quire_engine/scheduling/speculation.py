"""Speculative decoding: guessed tokens behind a decode, computed in the same step (Leviathan et al., arXiv:2211.17192).

A draft is accepted while it equals the token that the step draws at its position. A row has the same bits in any step,
and a draw follows from seed and position alone: so every token, log-probability and end of a request is what it is
without drafts. Promises: drafts are paid from what a step has left when everybody has been served: its budget, and
blocks that are free and hold nothing; no bound of the scheduler changes. Must not know: models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from quire_engine.contract.batch import PENDING
from quire_engine.contract.drafts import MOST_DRAFTS, Draft, Drafter, Wish
from quire_engine.contract.types import NO_DRAFT_CAUSES, NoDraftCause
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Sequence
from quire_engine.scheduling.step_plan import StepPlan

_WEIGHT = 0.2  # of the newest draft in a moving average
_KINDS = (3, 5, 9, 17)  # where one kind of match lengths ends and the next begins
_HOPES = (0.2, 0.4, 0.6, 0.8, 0.9)  # the share of drafts that is accepted, by kind, before anything is known
_HOPE_OF_COSTLY = 0.7  # the same of a drafter that computes its guesses, with which a sequence begins
_WEIGHT_FOR_ALL = 0.05  # of the newest draft in the average that a later sequence begins with
_LONGEST_START = 16  # times the tokens that may come: what a sequence has more is too long for a costly drafter to read
_FEWEST_PASSED = 32  # drafts of a sequence that do not pay, until one is tried all the same; then twice as many
_MOST_PASSED = 1024
_TRIED = 4  # drafts that a costly drafter is tried with: for the first one it has to catch up
_DECIDED_FOR = 16  # steps for which it is not asked again whether drafts pay that have just been found not to
_LED_BY = 16  # tokens of a prompt by which the first tokens of its answer are found again
_TRIAL = 16  # steps for which the other way to plan is tried
_BETWEEN = 2  # steps behind a change that belong to neither way
_WEIGHT_OF_RATE = 0.2  # of the newest step in a way's rate
_FEWEST_STEPS = 64  # until the other way is tried again; then twice as many
_MOST_STEPS = 4096
_SEARCHES = 4  # in a step, for sequences whose last draft was no use: each takes some microseconds
_MOST_SILENT = 256  # such searches since a draft was accepted, from which on a step has one


@dataclass(slots=True)
class _Record:
    """The worth of a sequence's drafts so far."""

    shares: list[float] = field(default_factory=lambda: list(_HOPES))  # accepted, by match length
    match: int = 0  # of the drafts in flight
    is_predicted: bool = False  # whether those are the client's own guess
    passed: int = 0  # drafts that did not pay, since the last one that was tried all the same
    patience: int = _FEWEST_PASSED


_Wanted = tuple[Sequence, _Record, Wish]


class Speculation:
    """Adds drafts to a finished plan, and learns what they and their rows are worth."""

    def __init__(
        self,
        drafter: Drafter,
        kv: KVAllocator,
        *,
        most: int = MOST_DRAFTS,
        row_seconds: Mapping[int, float] | None = None,
        most_rows: int | None = None,
        plans_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most`: drafts of one sequence in a step. `row_seconds`: of a step by its rows, as measured before the first.
        `most_rows`: of a step with drafts. `plans_ahead`: a step may be planned before the one before it is done.
        `clock`: for what a costly drafter's calls take.
        """
        self.total_drafts = self.total_draft_tokens = self.total_accepted_tokens = 0
        self.total_accepted_by_position = [0] * most
        self.total_undrafted: dict[NoDraftCause, int] = dict.fromkeys(NO_DRAFT_CAUSES, 0)  # slices
        self._drafter, self._kv, self._most = drafter, kv, most
        self._costs, self._most_rows = RowCosts(row_seconds), most_rows
        self._waiting = Waiting(has_choice=plans_ahead)
        self._is_drafted, self._accepted = False, 0  # whether the last plan has drafts; those accepted in a step
        self._records: dict[int, _Record] = {}
        self._useful: set[int] = set()  # the sequences of whose last drafts some were accepted
        self._turn = 0
        self._silent = 0  # searches in turns since a draft was accepted
        # Of a costly drafter.
        self._clock, self._drafting = clock, DraftingCosts()
        self._drafting_seconds = 0.0  # in the step that is under way
        self._hope = _HOPE_OF_COSTLY  # the average share of all sequences
        self._unpaid, self._tried = _Record(), 0  # steps with sequences that do not pay; drafts of one that was tried
        self._rare = -1  # the sequence that is tried in the step that is under way
        self._decided: tuple[int, tuple[float, ...]] = (0, ())  # rows and shares with which no drafts paid
        self._is_decided_for = 0  # further steps

    @property
    def needs_results(self) -> bool:
        """Whether the next plan depends on the tokens in flight: how many there are, or which ones."""
        return self._is_drafted or self._waiting.waits

    def extend(self, plan: StepPlan) -> None:
        """Give drafts to the plan's decodes, where it has few rows and its tokens are known."""
        self._drafting_seconds = 0.0
        if self._waiting.waits:
            self._extend(plan)
        else:
            self.total_undrafted["cost"] += len(plan.slices)
        self._is_drafted = bool(plan.drafts)

    def _extend(self, plan: StepPlan) -> None:
        rows = sum(plan.slices.values())
        budget = plan.budget if self._most_rows is None else min(plan.budget, self._most_rows - rows)
        if not rows or not self._costs.may_pay(rows, None if self._drafter.is_costly else self._most):
            self.total_undrafted["batch"] += len(plan.slices)
            return
        wishes = self._wishes(plan, rows)
        for (sequence, record, _), draft in zip(wishes, self._drafts(wishes), strict=True):
            if budget <= 0:
                self.total_undrafted["batch"] += 1
                continue
            self._useful.discard(sequence.sequence_id)  # until these are
            if not draft.token_ids:
                self.total_undrafted["nothing"] += 1
                continue
            count = min(len(draft.token_ids), budget)
            if not self._drafter.is_costly:  # else no more than pay were asked for
                count = self._costs.best(rows, count, record.shares[_kind(draft.match)]) or self._trial(record, rows)
            if count == 0:
                self.total_undrafted["cost"] += 1
                continue
            count = self.lend(plan, sequence, draft.token_ids[:count])
            if count == 0:
                self.total_undrafted["blocks"] += 1
                continue
            record.match, record.is_predicted = draft.match, draft.is_predicted
            rows, budget = rows + count, budget - count

    def lend(self, plan: StepPlan, sequence: Sequence, token_ids: tuple[int, ...]) -> int:
        """Add drafts to a decode, as far as there are free blocks for them; returns how many."""
        start = sequence.kv.num_computed
        count = max(0, self._kv.lend(sequence, start + 1 + len(token_ids)) - start - 1)
        if count:
            plan.add_drafts(sequence, token_ids[:count])
        return count

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> tuple[int, int] | None:
        """A step has tried `num_drafts` drafts of a sequence. Returns both numbers where a client has guessed them."""
        self.total_drafts += 1
        self.total_draft_tokens += num_drafts
        self.total_accepted_tokens += num_accepted
        self._accepted += num_accepted
        for position in range(num_accepted):
            self.total_accepted_by_position[position] += 1
        record = self._records.get(sequence.sequence_id)
        if record is None:
            return None
        if num_accepted:
            self._useful.add(sequence.sequence_id)
        kind = _kind(record.match)
        # The first rejected draft is the last that says something: what is behind it was never compared.
        for accepted in (*[1.0] * num_accepted, *[0.0] * (num_accepted < num_drafts)):
            record.shares[kind] += _WEIGHT * (accepted - record.shares[kind])
            self._hope += _WEIGHT_FOR_ALL * (accepted - self._hope)
        if num_accepted:
            record.patience = self._unpaid.patience = _FEWEST_PASSED
            self._silent = 0
        return (num_drafts, num_accepted) if record.is_predicted else None

    def note_end(self, sequence: Sequence) -> None:
        """A choice has all its tokens: others of the same prefix scope may be guessed from them."""
        request, first = sequence.group.request, len(sequence.group.request.prompt_token_ids)
        if request.speculates:
            self._drafter.note_end(sequence.token_ids[max(first - _LED_BY, 0) :], request.cache_salt)

    def learn(self, num_rows: int, num_decodes: int, seconds: float) -> None:
        """A step of decodes and drafts took so long; the drafts accepted in it have been noted."""
        if self._waiting.waits:
            self._costs.learn(num_rows, seconds - self._drafting_seconds)
        if num_decodes and seconds > 0:
            self._waiting.learn((num_decodes + self._accepted) / num_decodes / seconds)
        self._accepted = 0

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget what was learnt of sequences that have ended or lost their blocks; those that run again learn anew."""
        for sequence_id in sequence_ids:
            if self._records.pop(sequence_id, None) is not None:
                self._useful.discard(sequence_id)
                self._drafter.forget(sequence_id)

    def _wishes(self, plan: StepPlan, rows: int) -> list[_Wanted]:
        """The sequences to guess for, with as many tokens of each as the step has room for if it is the only one."""
        is_costly, wanted = self._drafter.is_costly, []
        for sequence in plan.slices if is_costly else self._in_turns(plan):
            room, request, tokens = self._room(sequence), sequence.group.request, sequence.token_ids
            most = min(self._most, plan.budget, room)
            record = self._records.get(sequence.sequence_id)
            if most <= 0:
                self.total_undrafted["request" if plan.budget else "batch"] += 1
                continue
            if is_costly and record is None and len(tokens) > _LONGEST_START * room:
                self.total_undrafted["cost"] += 1
                continue
            if record is None:
                hope = max(self._hope, _HOPE_OF_COSTLY if request.prediction else 0.0)
                record = _Record([hope] * len(_HOPES)) if is_costly else _Record()
                self._records[sequence.sequence_id] = record
            wish = Wish(sequence.sequence_id, tokens, most, request.prediction, request.cache_salt)
            wanted.append((sequence, record, wish))
        return self._paying(wanted, rows) if is_costly and wanted else wanted

    def _paying(self, wanted: list[_Wanted], rows: int) -> list[_Wanted]:
        """The wishes whose drafts pay for their rows and for the time to guess them, with as many tokens as pay best.

        Rarely one more with one token, a few times in a row, to see whether its drafts have become better.
        """
        shares = [record.shares[_kind(record.match)] for _, record, _ in wanted]
        order = sorted(range(len(wanted)), key=lambda i: -shares[i])
        count, most = self._round(rows, [shares[i] for i in order])
        tokens = dict.fromkeys(order[:count], most)
        self._rare = -1
        if count < len(order):
            self._unpaid.passed += 1
            if self._unpaid.passed >= self._unpaid.patience and self._costs.best(rows, 1, 1.0):
                tokens[order[count]], self._rare = 1, wanted[order[count]][0].sequence_id
        self.total_undrafted["cost"] += len(wanted) - len(tokens)
        chosen = [(*wanted[i], tokens[i]) for i in sorted(tokens)]
        return [(sequence, record, wish._replace(most=min(wish.most, n))) for sequence, record, wish, n in chosen]

    def _round(self, rows: int, shares: list[float]) -> tuple[int, int]:
        """See `RowCosts.best_round`. That no drafts pay holds for a few steps of the same rows and shares: the search
        for better ones is what a drafter costs that is never right.
        """
        if self._is_decided_for and self._decided == (rows, tuple(shares)):
            self._is_decided_for -= 1
            return 0, 0
        count, most = self._costs.best_round(rows, shares, self._most, self._drafting)
        self._decided, self._is_decided_for = (rows, tuple(shares)), 0 if count else _DECIDED_FOR
        return count, most

    def _drafts(self, wanted: list[_Wanted]) -> list[Draft]:
        """The drafts, and what they took where that counts: not while the drafter still computes what came before."""
        wishes = [wish for _, _, wish in wanted]
        if not self._drafter.is_costly or not wishes:
            return self._drafter.draft(wishes)
        began = self._clock()
        drafts = self._drafter.draft(wishes)
        self._drafting_seconds = self._clock() - began
        if all(draft.token_ids for draft in drafts):
            self._drafting.learn(len(drafts), self._drafting_seconds / max(wish.most for wish in wishes))
        self._tried += any(draft.token_ids and i == self._rare for (i, *_), draft in zip(wishes, drafts, strict=True))
        if self._tried == _TRIED:
            self._unpaid.passed, self._unpaid.patience = 0, min(2 * self._unpaid.patience, _MOST_PASSED)
            self._tried = 0
        return drafts

    def _in_turns(self, plan: StepPlan) -> list[Sequence]:
        """The sequences to search drafts for: those whose last drafts were of use, and a few of the others."""
        useful, others = [], list(plan.slices)
        if self._useful:
            useful = [sequence for sequence in others if sequence.sequence_id in self._useful]
            others = [sequence for sequence in others if sequence.sequence_id not in self._useful]
        searches = _SEARCHES if self._silent < _MOST_SILENT else 1
        if len(others) > searches:
            first, count = self._turn, len(others)
            self._turn += searches
            self._silent += searches
            self.total_undrafted["turn"] += count - searches
            others = [others[place % count] for place in range(first, first + searches)]
        return useful + others

    def _trial(self, record: _Record, rows: int) -> int:
        """How many drafts to try although they would not pay: one, rarely, where a right one would."""
        record.passed += 1
        if record.passed < record.patience or not self._costs.best(rows, 1, 1.0):
            return 0
        record.passed, record.patience = 0, min(2 * record.patience, _MOST_PASSED)
        return 1

    @staticmethod
    def _room(sequence: Sequence) -> int:
        """Drafts that a sequence may have at most: of requests whose rows follow from their own tokens alone."""
        group = sequence.group
        is_plain = (
            group.request.speculates
            and group.prompt_shared
            and group.beams is None
            and group.pooled is None
            and not group.prompt_logprobs_due
            and sequence.num_output_tokens > 0
            and sequence.token_ids[-1] != PENDING
            and group.pending(sequence) == 1  # not behind forced tokens, which the same step computes
        )
        return group.max_new_tokens - sequence.num_output_tokens - 1 if is_plain else 0


class Waiting:
    """Whether steps are planned when the tokens of those before are known, which drafts need, or ahead of them.

    Where the device computes a step beside the host both ways are possible. The better one is what was measured, in
    tokens of a sequence a second; the other one is tried again for a few steps, ever more rarely while it loses.
    """

    def __init__(self, *, has_choice: bool) -> None:
        self.waits = not has_choice
        self._has_choice = has_choice
        self._rates = {False: 0.0, True: 0.0}
        self._is_trial, self._steps, self._patience = False, 0, _TRIAL

    def learn(self, rate: float) -> None:
        """A step of decodes gave so many tokens of a sequence a second."""
        if not self._has_choice:
            return
        self._steps += 1
        if self._steps <= _BETWEEN:
            return
        before = self._rates[self.waits]
        self._rates[self.waits] = before + _WEIGHT_OF_RATE * (rate - before) if before else rate
        if self._steps < (_TRIAL if self._is_trial else self._patience):
            return
        if self._is_trial:
            waits = self._rates[True] > _GAIN * self._rates[False]
            self._patience = _FEWEST_STEPS if waits == self.waits else min(2 * self._patience, _MOST_STEPS)
            self._is_trial, self.waits = False, waits
        else:
            self._is_trial, self.waits = True, not self.waits
            self._rates[self.waits] = 0.0
        self._steps = 0


Speculate = Callable[[KVAllocator], Speculation]


def _kind(match: int) -> int:
    return sum(match >= bound for bound in _KINDS)


_TILE = 6  # rows that one pass over the weights serves
_STEP = 0.25  # what a further tile costs, of the first, until it is measured
_ROW = 0.02  # what a row costs beside its tile
_MOST_ROWS = 64  # more make speculation dear for certain
_KEPT = 0.99  # of the weight of a step, when the next one has been measured
_LONGEST = 3.0  # times the expected seconds: what a step took longer says nothing about its rows
_FLAT = 1e-9  # the relative variance of stairs that are none
_BELIEF = 0.5  # the weight, in steps, of the stairs' own proportion
_WEIGHT_OF_SHORTER, _WEIGHT_OF_LONGER = 0.5, 0.1  # of the newest call in the moving average of a drafter's time
_GAIN = 1.05  # the least that drafts have to promise: the search for them and their results cost something too


class RowCosts:
    """The cost of a step by its rows: the stairs of the kernels' tiles, as a line through them fits what was measured.

    Least squares of seconds over stairs, older steps counting less. Single steps say little: on a shared machine those
    of the same rows differ by half, and a table of them would avoid for ever what was slow once. So the shape of the
    stairs is never learned from them: it is what was measured on purpose before the first step, or tiles of six rows.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        """`measured`: seconds of a step by its rows, where they were measured on this machine."""
        self._table = measured_stairs(measured or {})
        self._is_measured = bool(measured)  # or learned: whether costs are seconds
        self._sums = [0.0] * 5  # of 1, x, y, x * x and x * y, x being stairs and y seconds
        self._fixed, self._rate = 0.0, 1.0  # a step costs fixed + rate * stairs
        for rows in measured or ():
            self.learn(rows, self._stairs(rows))

    def learn(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows > 2 * _MOST_ROWS or seconds <= 0:
            return
        x, sums = self._stairs(rows), self._sums
        y = min(seconds, _LONGEST * self._cost(rows)) if self._is_measured else seconds
        self._is_measured = True
        for i, value in enumerate((1.0, x, y, x * x, x * y)):
            sums[i] = _KEPT * sums[i] + value
        n, sum_x, sum_y, sum_xx, sum_xy = sums
        scale = sum_y / sum_x
        for x in (self._stairs(1), self._stairs(_MOST_ROWS)):
            n, sum_x, sum_y = n + _BELIEF, sum_x + _BELIEF * x, sum_y + _BELIEF * scale * x
            sum_xx, sum_xy = sum_xx + _BELIEF * x * x, sum_xy + _BELIEF * scale * x * x
        spread = n * sum_xx - sum_x * sum_x
        if spread <= _FLAT * n * sum_xx:  # rows cost nothing, so that there is no line to find
            self._fixed, self._rate = 0.0, scale
            return
        self._rate = max(n * sum_xy - sum_x * sum_y, 0.0) / spread
        self._fixed = max(sum_y - self._rate * sum_x, 0.0) / n

    def may_pay(self, rows: int, most: int | None) -> bool:
        """Whether there are few enough rows; with `most` drafts of one sequence also, whether certain ones would pay.

        If those do not, no others do, and need not be looked for.
        """
        return rows < _MOST_ROWS and (most is None or self.best(rows, most, 1.0) > 0)

    def best(self, rows: int, most: int, share: float) -> int:
        """How many drafts of one sequence, each accepted with this probability if those before it were, pay best.

        The aim is tokens a second of the whole step, which has `rows` rows without them.
        """
        best, best_rate, tokens, alive = 0, _GAIN * rows / self._cost(rows), float(rows), 1.0
        for count in range(1, most + 1):
            alive *= share
            tokens += alive
            rate = tokens / self._cost(rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def best_round(self, rows: int, shares: Values[float], most: int, drafting: DraftingCosts) -> tuple[int, int]:
        """Return how many sequences, the first ones, and how many drafts of each pay best, with the time to guess them.

        `shares`, of the sequences, fall. While no step has been measured, that time is left out.
        """
        best, best_rate = (0, 0), _GAIN * rows / self._cost(rows)
        alive, gains = [1.0] * len(shares), [0.0] * len(shares)
        for each in range(1, most + 1):
            alive = [before * share for before, share in zip(alive, shares, strict=True)]
            gains = [before + share for before, share in zip(gains, alive, strict=True)]
            for count, gain in enumerate(accumulate(gains), 1):
                guessing = each * drafting.seconds(count) if self._is_measured else 0.0
                rate = (rows + gain) / (self._cost(rows + count * each) + guessing)
                if rate > best_rate:
                    best, best_rate = (count, each), rate
        return best

    def _cost(self, rows: int) -> float:
        """Seconds, or relative to other numbers of rows while nothing has been measured."""
        return self._fixed + self._rate * self._stairs(rows)

    def _stairs(self, rows: int) -> float:
        table = self._table
        return table[rows] if rows < len(table) else table[-1] * _stairs(rows) / _stairs(len(table) - 1)


class DraftingCosts:
    """Seconds in which a costly drafter guesses one token of each of some sequences: its rows cost by stairs too.

    A disturbance makes a call longer, and a drafter that seems dear is seldom asked: so shorter calls count more.
    """

    def __init__(self) -> None:
        self._unit = 0.0  # over the stairs; 0: not known yet

    def learn(self, num_sequences: int, seconds: float) -> None:
        """A token of so many sequences took so long."""
        measured = seconds / _stairs(num_sequences)
        if self._unit <= 0:
            self._unit = measured
        else:
            change = min(measured, _LONGEST * self._unit) - self._unit
            self._unit += (_WEIGHT_OF_SHORTER if change < 0 else _WEIGHT_OF_LONGER) * change

    def seconds(self, num_sequences: int) -> float:
        return self._unit * _stairs(num_sequences)


def _stairs(rows: int) -> float:
    return 1.0 + _STEP * ((rows - 1) // _TILE) + _ROW * rows


def measured_stairs(measured: Mapping[int, float]) -> list[float]:
    """Seconds by rows, from 0 on: linear between the measured numbers of rows, which begin at 1, in proportion to the
    stairs of six beyond. Empty: those stairs.

    A step takes no longer than one of more rows. Disturbances only lengthen a measurement, so the shorter one counts.
    """
    if not measured:
        return [_stairs(rows) for rows in range(2 * _MOST_ROWS + 1)]
    known, least = sorted(measured), dict(measured)
    for few, many in reversed(list(pairwise(known))):
        least[few] = min(least[few], least[many])
    table = [least[known[0]]] * (known[0] + 1)
    for few, many in pairwise(known):
        slope = (least[many] - least[few]) / (many - few)
        table += [least[few] + slope * (rows - few) for rows in range(few + 1, many + 1)]
    return table
