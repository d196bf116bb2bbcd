"""Students' schedulers, pools and tables: six that are right, and what is planted in them, each found and named."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from quire_lab.mine.command import run
from quire_lab.mine.judge import MACHINE, judge, loads
from quire_lab.mine.process import StudentError, StudentProcess
from quire_lab.mine.referee import BLOCKS, COULD, NOBODY, Arrival, Broken, Machine, Plan, Referee, Slice, plan_of
from quire_lab.mine.schedulers import ListPool, OurScheduler, PlainScheduler, StaticScheduler
from quire_lab.mine.serving import MACHINE as SERVED
from quire_lab.mine.serving import serving_load
from support.covering import few
from support.processes import lives

STUDENTS = Path(__file__).parents[2] / "support" / "students"
RIGHT = sorted(STUDENTS.glob("*.py"))

# What is planted: the file, the text and what comes in its place; what is found: the class, the invariant, the name.
PLANTED = {
    "the step's budget is not kept": (
        ("first_come", "size = min(budget, request.known)", "size = request.known"),
        ("Scheduler", "I5", "budget"),
    ),
    "more sequences run than there are seats": (
        ("first_come", " and len(self.running) < self.max_num_seqs:", ":"),
        ("Scheduler", "I5", "seats"),
    ),
    "a preempted request keeps its blocks": (
        ("first_come", "request.blocks, request.computed = [], 0", "request.computed = 0"),
        ("Scheduler", "I3", "shares"),
    ),
    "half a block is none": (
        (
            "first_come",
            "-(-(request.computed + size) // self.block_size)",
            "(request.computed + size) // self.block_size",
        ),
        ("Scheduler", "I4", "short"),
    ),
    "a table that grows at its beginning": (
        ("first_come", "request.blocks.append(self.free.pop(0))", "request.blocks.insert(0, self.free.pop(0))"),
        ("Scheduler", "I12", "moves"),
    ),
    "two decodes a step, whoever else runs": (
        ("first_come", "for name in decodes_first:", "for name in decodes_first[:2]:"),
        ("Scheduler", "I6", "stall"),
    ),
    "nobody enters unless twenty blocks stay free": (
        (
            "first_come",
            "self.needs(request, size) > len(self.free):\n                break",
            "self.needs(request, size) + 20 > len(self.free):\n                break",
        ),
        ("Scheduler", "I8", "idle"),
    ),
    "who comes last enters first": (
        ("first_come", "next(iter(self.waiting.items()))", "list(self.waiting.items())[-1]"),
        ("Scheduler", "I17", "starves"),
    ),
    "the first block is forgotten at the end": (
        ("first_come", "self.running.pop(request_id).blocks", "self.running.pop(request_id).blocks[1:]"),
        ("Scheduler", "I15", "leak"),
    ),
    "the lot decides who gives up its blocks": (
        (
            "first_come",
            "other not in sizes][-1]",
            "other not in sizes and __import__('random').random() < 2]; victim = __import__('random').choice(victim)",
        ),
        ("Scheduler", "I10", "differs"),
    ),
    "who has ended is computed further": (
        ("reserving", 'self.free.extend(self.live.pop(request_id)["blocks"])', "pass"),
        ("Scheduler", "I19", "unknown"),
    ),
    "a sequence in one step twice": (
        ("reserving", 'slices.append((name, count, one["blocks"]))', 'slices += [(name, count, one["blocks"])] * 2'),
        ("Scheduler", "I4", "twice"),
    ),
    "an answer of another form": (
        ("reserving", "return slices, []", "return slices"),
        ("Scheduler", "I4", "shape"),
    ),
    "an exception under load": (
        ("reserving", "budget, slices = self.budget, []", "budget, slices = self.budget // (4 - len(self.live)), []"),
        ("Scheduler", "", "raises"),
    ),
    "a loop without an end": (
        (
            "reserving",
            "budget, slices = self.budget, []",
            "budget, slices = self.budget, []\n        while len(self.live) > 3:\n            pass",
        ),
        ("Scheduler", "", "slow"),
    ),
    "a shared block is free after one release": (
        ("listed_pool", "self.refs[block] += 1", "pass"),
        ("BlockPool", "I1", "forgets"),
    ),
    "a block is released twice": (
        (
            "listed_pool",
            "        self.refs[block] -= 1\n        if self.refs[block] == 0:",
            "        self.refs[block] = self.refs.get(block, 1) - 1\n        if self.refs[block] == 0:",
        ),
        ("BlockPool", "I1", "released twice"),
    ),
    "a block from an empty pool": (
        ("listed_pool", "            return None", "            return 0"),
        ("BlockPool", "I2", "invents"),
    ),
    "a count of what is in use": (
        ("listed_pool", "return len(self.free)", "return len(self.refs)"),
        ("BlockPool", "I2", "num_free"),
    ),
    "a copy on write that is not counted": (
        ("lesson_pool", "        self.cow_copies += 1\n", ""),
        ("BlockPool", "I3", "copies"),
    ),
    "a copy for the last owner, too": (
        ("lesson_pool", "        if self.ref_count[block] == 1:\n            return block\n", ""),
        ("BlockPool", "I3", "copies own"),
    ),
    "a write to a block that others share": (
        ("lesson_pool", "if self.ref_count[block] == 1:", "if self.ref_count[block] >= 1:"),
        ("BlockPool", "I3", "writes shared"),
    ),
    "a copy that keeps the reference to what it copies": (
        ("lesson_pool", "        self.ref_count[block] -= 1\n        self.cow_copies", "        self.cow_copies"),
        ("BlockPool", "I3", "copies own"),
    ),
    "a position one too far": (
        ("lesson_pool", "position % self.block_size", "(position + 1) % self.block_size"),
        ("PageTable", "I4", "position"),
    ),
    "alloc() that raises while blocks are free": (
        ("lesson_pool", "if not self.free_list:", "if len(self.free_list) < 3:"),
        ("BlockPool", "", "raises"),
    ),
    "a block that does not come back": (
        ("listed_pool", "            self.free.append(block)", "            self.free += [block] if block else []"),
        ("BlockPool", "I2", "num_free"),
    ),
}


@pytest.mark.parametrize(
    "path",
    few(RIGHT, *(path for path in RIGHT if path.stem in ("first_come", "listed_pool"))),
    ids=[path.stem for path in RIGHT],
)
def test_what_is_right_has_no_fault(path: Path):
    classes, faults = judge(path)
    assert classes
    assert faults == []


def test_there_are_right_ones_of_every_kind():
    found = {tuple(judge_classes(path)) for path in RIGHT}
    assert found == {("BlockPool",), ("Scheduler",), ("BlockPool", "Scheduler"), ("BlockPool", "PageTable")}


def judge_classes(path: Path) -> list[str]:
    with StudentProcess(path) as student:
        return student.classes()


@pytest.mark.parametrize("case", few(PLANTED, *list(PLANTED)[3::7]))
def test_what_is_planted_is_named(case: str, tmp_path: Path):
    (name, old, new), expected = PLANTED[case]
    text = (STUDENTS / f"{name}.py").read_text()
    assert text.count(old) == 1
    path = tmp_path / "mine.py"
    path.write_text(text.replace(old, new))
    _, faults = judge(path, call_seconds=2.0 if expected[2] == "slow" else 30.0)
    assert expected in [(fault.of, fault.invariant, fault.name) for fault in faults], faults
    assert all(fault.said.endswith(")") for fault in faults), "the load or the call is named"


def test_two_faults_are_both_named(tmp_path: Path):
    text = (STUDENTS / "first_come.py").read_text()
    text = text.replace(" and len(self.running) < self.max_num_seqs:", ":")
    text = text.replace("self.running.pop(request_id).blocks", "self.running.pop(request_id).blocks[1:]")
    (tmp_path / "mine.py").write_text(text)
    assert {fault.name for fault in judge(tmp_path / "mine.py")[1]} >= {"seats", "leak"}


POOL = (STUDENTS / "lesson_pool.py").read_text().partition("class PageTable")[0]
TABLE = """
class PageTable:
    {init}
    def position_to_block(self, position):
        return {answer}
"""


@pytest.mark.parametrize(
    ("init", "answer"),
    [
        ("def __init__(self, block_size): self.size = block_size", "divmod(position, self.size)"),
        ("def __init__(self, size): self.size = size", "position // self.size"),
        (
            "def __init__(self, pool, block_size=16): self.blocks, self.size, self.of = [], block_size, pool",
            "self.blocks[position // self.size]",
        ),
        (
            "def __init__(self, block_size, blocks=()): self.ids, self.size = list(blocks), block_size\n"
            "    def extend(self, blocks): self.ids += blocks",
            "[self.ids[position // self.size], position % self.size]",
        ),
    ],
    ids=["entry and offset", "entry", "block", "block and offset"],
)
def test_a_table_answers_in_the_form_of_its_lesson(init: str, answer: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(POOL + TABLE.format(init=init, answer=answer))
    assert judge(tmp_path / "mine.py") == (["BlockPool", "PageTable"], [])


def test_a_pool_without_sharing_is_judged_by_what_it_has(tmp_path: Path):
    before, _, rest = POOL.partition("    def share")
    kept = before + "    def free" + rest.partition("    def free")[2].partition("    def copy_on_write")[0]
    (tmp_path / "mine.py").write_text(kept)
    assert judge(tmp_path / "mine.py") == (["BlockPool"], [])
    (tmp_path / "mine.py").write_text(kept.replace("def free(", "def put("))
    (fault,) = judge(tmp_path / "mine.py")[1]
    assert "BlockPool has no release or free" in fault.said


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("x = 1\n", "empty", "neither a BlockPool nor a Scheduler"),
        ("import nothing_of_this_name\n", "import", "ModuleNotFoundError"),
        ("class Scheduler:\n    pass\n", "raises", "TypeError"),
        ("import os\nos._exit(3)\n", "import", "has ended with exit code 3"),
        ("def f(:\n", "import", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_tried_is_told_in_a_line(text: str, name: str, said: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(text)
    (fault,) = judge(tmp_path / "mine.py")[1]
    assert fault.name == name
    assert said in fault.said
    assert "\n" not in fault.said


def test_a_students_process_is_apart_and_gone_at_the_end(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, sys\n"
        "print('noise')\n"
        "class BlockPool:\n"
        "    def __init__(self, num_blocks): self.child = os.fork() or os.execlp('sleep', 'sleep', '1000')\n"
        "    def pids(self): return [os.getpid(), self.child]\n"
        "    def seen(self): return sorted(name for name in sys.modules if name.startswith('quire'))\n"
        "    def home(self): return [os.environ.get('HOME'), os.getcwd()]\n"
        "    def eat(self): return len(bytearray(4 << 30))\n"
    )
    with StudentProcess(path) as student:
        pool = student.make("BlockPool", 4)
        pids = pool.call("pids")
        assert pool.call("seen") == []
        home, folder = pool.call("home")
        assert home is None
        assert Path(folder) != Path.cwd()
        with pytest.raises(StudentError, match="MemoryError"):
            pool.call("eat")
    assert not Path(folder).exists()
    deadline = time.monotonic() + 300
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "a killed process takes a moment to go"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "scheduler",
    [OurScheduler, StaticScheduler, lambda machine: PlainScheduler(machine, ListPool(machine.num_blocks))],
    ids=["ours", "static", "plain"],
)
def test_ours_keeps_what_is_asked_of_students(scheduler):
    for load in loads():
        Referee(MACHINE, load.arrivals).run(scheduler(MACHINE))
    Referee(SERVED, serving_load()).run(scheduler(SERVED))


def test_ours_leaves_no_seat_empty_for_a_growth_that_costs_less():
    """A step that costs the same whatever it holds makes an empty seat dear and computing again nearly free."""
    ours, plain = (
        Referee(SERVED, serving_load()).run(scheduler)
        for scheduler in (OurScheduler(SERVED), PlainScheduler(SERVED, ListPool(SERVED.num_blocks)))
    )
    assert ours.steps <= 1.02 * plain.steps
    assert ours.empty_seats.get(COULD, 0) < 30
    assert ours.preemptions <= plain.preemptions


def test_empty_seats_have_their_causes():
    """Two seats; static batching leaves one empty beside a request that could have it."""
    machine = Machine(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    load = [
        Arrival(request_id=name, num_prompt=4, max_new_tokens=most) for name, most in (("a", 2), ("b", 8), ("c", 2))
    ]
    static = Referee(machine, load).run(StaticScheduler(machine))
    assert static.steps == 10
    assert static.empty_seats == {COULD: 6, NOBODY: 2}
    ours = Referee(machine, load).run(OurScheduler(machine))
    assert ours.steps == 8
    assert COULD not in ours.empty_seats
    short = Machine(num_blocks=3, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    counts = Referee(short, load).run(StaticScheduler(short))
    assert counts.empty_seats.get(BLOCKS, 0) > 0


def test_tokens_that_are_computed_again_are_counted():
    load = next(load for load in loads() if "outgrow" in load.name)
    counts = Referee(MACHINE, load.arrivals).run(PlainScheduler(MACHINE, ListPool(MACHINE.num_blocks)))
    assert counts.preemptions > 0
    assert counts.recomputed_tokens > 0
    needed = sum(one.num_prompt + one.max_new_tokens - 1 for one in load.arrivals)
    assert counts.computed_tokens == needed + counts.recomputed_tokens


def test_a_plan_is_read_or_refused():
    plan = plan_of([[["a", 2, [0, 1]]], ["b"]])
    assert plan == Plan(slices=(Slice(request_id="a", num_tokens=2, blocks=(0, 1)),), preempted=("b",))
    for wrong in (None, 3, [], [[]], [[["a", 2]], []], [[["a", "2", [0]]], []], [[["a", 2, [0.5]]], []], [[], [1]]):
        with pytest.raises(Broken, match="I4 shape"):
            plan_of(wrong)


def test_the_command_says_what_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["--mine", str(STUDENTS / "reserving.py"), "--no-model"]) == 0
    assert "reserving.py: Scheduler: every invariant holds" in capsys.readouterr().out
    path = tmp_path / "mine.py"
    path.write_text((STUDENTS / "reserving.py").read_text().replace("return slices, []", "return [], []"))
    assert run(["--mine", str(path), "--no-model"]) == 1
    assert "Scheduler: I8 idle: a step computes nothing" in capsys.readouterr().out
    assert run(["--mine", str(tmp_path / "nothing.py")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["--help"])
    assert "--mine FILE" in capsys.readouterr().out
    assert "quire_lab.mine" in sys.modules
