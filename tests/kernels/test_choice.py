"""Which instruction set serves: by flags, by a measurement that is remembered, or as asked for; never by chance."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from quire_engine.contract.config import CpuVariant
from quire_kernels.cpu import build, choice, library, remembered
from quire_kernels.cpu.choice import Chosen, UnusableVariant, load_chosen
from quire_kernels.cpu.compiler import CompilationError
from quire_kernels.cpu.rates import CoreRates
from quire_kernels.cpu.variants import VARIANTS, Variant
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select

BY_NAME = {variant.name: variant for variant in VARIANTS}
BF16, VNNI, AVX512, AVX2, PORTABLE = (
    BY_NAME[name] for name in ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
)
AMD = CoreRates(fp32=116e9, bf16=234e9)
INTEL = CoreRates(fp32=95e9, bf16=35e9)
CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Some Xeon
stepping\t: 8
microcode\t: 0x2b000461
cpu MHz\t\t: {mhz}
flags\t\t: fpu avx512_bf16

processor\t: 1
model\t\t: 99
"""


class Machine:
    """A CPU and a compiler that were thought up: what is usable, what is refused, what a measurement would say."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.usable: tuple[Variant, ...] = (BF16, VNNI, AVX512, AVX2, PORTABLE)
        self.refused: set[str] = set()  # by the compiler
        self.rates = AMD
        self.built: list[str] = []
        self.measured: list[str] = []

    def load_library(self, variant: Variant, **_: object) -> SimpleNamespace:
        if variant.name in self.refused:
            raise CompilationError(f"c++ failed:\nerror: no {variant.name}")
        self.built.append(variant.name)
        return SimpleNamespace(name=variant.name)

    def core_rates(self, library: SimpleNamespace) -> CoreRates:
        self.measured.append(library.name)
        return self.rates

    def start(self, asked: str | None = None) -> Chosen:
        self.built.clear()
        self.measured.clear()
        return load_chosen(asked, cache_dir=self.cache)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "cache")
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(mhz=2000))
    monkeypatch.setattr(remembered, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(choice, "usable_variants", lambda: made.usable)
    monkeypatch.setattr(choice, "load_library", made.load_library)
    monkeypatch.setattr(choice, "core_rates", made.core_rates)
    return made


def kept(machine: Machine) -> Path:
    (file,) = machine.cache.glob("rates-*.json")
    return file


@pytest.mark.parametrize(
    ("rates", "expected", "why"),
    [
        (AMD, BF16, "VDPBF16PS makes 234 GFLOP/s on one core, FMA 116 GFLOP/s"),
        (INTEL, VNNI, "bf16 by FMA, 95 GFLOP/s on one core; VDPBF16PS makes 35 GFLOP/s"),
        (CoreRates(fp32=100e9, bf16=100e9), BF16, ""),
        (CoreRates(fp32=129e9, bf16=100e9), BF16, ""),  # no clear margin: the flags' order stands
        (CoreRates(fp32=131e9, bf16=100e9), VNNI, ""),
    ],
)
def test_bf16_is_multiplied_by_what_is_faster(machine: Machine, rates: CoreRates, expected: Variant, why: str):
    machine.rates = rates
    chosen = machine.start()
    assert (chosen.variant, chosen.library.name) == (expected, expected.name)
    assert why in chosen.why
    assert machine.measured == ["avx512_bf16"]
    # The one that has both instructions is asked for both rates; only the one that wins is compiled beside it.
    assert machine.built == (["avx512_bf16"] if expected is BF16 else ["avx512_bf16", "avx512_vnni"])


def test_a_measurement_is_made_once_and_the_choice_does_not_move_with_the_machines_moods(machine: Machine):
    machine.rates = INTEL
    first = machine.start()
    machine.rates = AMD
    again = machine.start()
    assert again == replace(first, library=again.library)
    assert machine.measured == []
    assert machine.built == ["avx512_vnni"]
    assert stat.S_IMODE(kept(machine).stat().st_mode) == 0o600


def test_another_cpu_microcode_or_set_of_flags_is_measured_anew_and_another_clock_is_not(
    machine: Machine, tmp_path: Path
):
    machine.rates = INTEL
    machine.start()
    text = CPUINFO.format(mhz=2000)
    for old, new in (("Some Xeon", "Other"), ("0x2b000461", "0x2b000590"), ("fpu avx512_bf16", "fpu avx512_bf16 amx")):
        (tmp_path / "cpuinfo").write_text(text.replace(old, new))
        machine.start()
        assert machine.measured == ["avx512_bf16"], old
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(mhz=3100))
    machine.start()
    assert machine.measured == []
    assert len(list(machine.cache.glob("rates-*.json"))) == 4


def test_what_other_flags_make_is_measured_apart(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    """Such as those of sanitizers, which make some things slow, in processes that share the folder."""
    with monkeypatch.context() as sanitized:
        sanitized.setattr(library, "FLAGS", (*library.FLAGS, "-fsanitize=address"))
        machine.rates = INTEL
        assert machine.start().variant is VNNI
    machine.rates = AMD
    assert machine.start().variant is BF16


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("95000000000.0", "-1.0"),
        lambda text: text.replace("95000000000.0", "NaN"),
        lambda text: text.replace("95000000000.0", '"much"'),
        lambda text: text.replace('"fp32"', '"fp64"'),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace("Some Xeon", "Another"),
    ],
)
def test_what_is_damaged_or_of_another_cpu_is_not_believed(machine: Machine, damage: Callable[[str], str]):
    machine.rates = INTEL
    machine.start()
    whole = kept(machine).read_text()
    assert damage(whole) != whole
    kept(machine).write_text(damage(whole))
    machine.rates = AMD
    assert machine.start().variant is BF16
    assert machine.measured == ["avx512_bf16"]
    assert machine.start().variant is BF16
    assert machine.measured == []


def test_a_planted_file_is_not_believed(machine: Machine, caplog: pytest.LogCaptureFixture):
    machine.rates = INTEL
    machine.start()
    kept(machine).chmod(0o666)
    machine.rates = AMD
    with caplog.at_level(logging.WARNING):
        assert machine.start().variant is BF16
    assert "can be written to by others; remove it; it is not believed but measured anew" in caplog.text
    assert stat.S_IMODE(kept(machine).stat().st_mode) == 0o600


def test_where_nothing_can_be_kept_every_start_measures(machine: Machine, tmp_path: Path):
    (tmp_path / "a-file").write_text("")
    machine.cache = tmp_path / "a-file" / "cache"
    for _ in range(2):
        assert machine.start().variant is BF16
        assert machine.measured == ["avx512_bf16"]


def test_one_of_two_starts_measures_and_the_other_believes_it(machine: Machine):
    """The second one finds nothing, and what the first one says when its turn comes."""
    assert remembered.recalled(machine.cache) is None
    assert remembered.remembered(lambda: INTEL, machine.cache) == INTEL
    assert remembered.remembered(lambda: AMD, machine.cache) == INTEL


def test_only_flags_decide_where_no_two_ways_of_bf16_compete(machine: Machine):
    machine.usable = (AVX512, AVX2, PORTABLE)
    chosen = machine.start()
    assert (chosen.variant, chosen.why) == (AVX512, "the best of this CPU's by its flags")
    machine.usable = (PORTABLE,)
    assert machine.start().variant is PORTABLE
    assert not machine.cache.exists()


def test_a_better_one_than_both_needs_no_measurement(machine: Machine):
    best = replace(BF16, name="amx")
    machine.usable = (best, *machine.usable)
    machine.rates = INTEL
    assert machine.start().variant is best
    assert machine.measured == []


def test_one_that_the_compiler_does_not_know_is_passed_over(machine: Machine, caplog: pytest.LogCaptureFixture):
    machine.usable = (replace(BF16, name="amx"), *machine.usable)
    machine.rates, machine.refused = INTEL, {"amx"}
    with caplog.at_level(logging.WARNING):
        assert machine.start().variant is VNNI  # measured, as if the first one did not exist
    (record,) = caplog.records
    assert record.getMessage() == ("cannot build the kernels for amx, using slower ones: c++ failed: error: no amx")
    machine.refused = {"amx", "avx512_bf16", "avx512_vnni"}
    chosen = machine.start()
    assert chosen.variant is AVX512
    assert chosen.why.endswith("as it does not know amx, avx512_bf16, avx512_vnni")


def test_the_slower_of_both_serves_where_the_faster_cannot_be_compiled(machine: Machine):
    machine.rates, machine.refused = INTEL, {"avx512_vnni"}
    assert machine.start().variant is BF16
    assert machine.start().variant is BF16


def test_what_is_asked_for_serves_without_a_measurement(machine: Machine):
    machine.rates = INTEL
    chosen = machine.start("avx512_bf16")
    assert (chosen.variant, chosen.why) == (BF16, "as asked for")
    assert machine.measured == []
    machine.refused = {"avx512_bf16"}
    with pytest.raises(CompilationError):  # and nothing else does
        machine.start("avx512_bf16")


def test_what_cannot_run_here_is_refused_by_name(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "compilable_variants", lambda: (BF16, VNNI, AVX2, PORTABLE))
    monkeypatch.setattr(choice, "cpu_features", lambda: VNNI.features)
    monkeypatch.setattr(choice, "refusal", lambda variant: f"{variant.name} is forbidden")
    machine.usable = (VNNI, PORTABLE)
    for asked, said in (
        ("avx512_bf16", "cannot compute with avx512_bf16: this CPU has no avx512_bf16 (leave cpu_variant out, or set"),
        ("avx2", "cannot compute with avx2: avx2 is forbidden (leave"),
        ("neon_bf16", "are not made for neon_bf16 on this machine (leave cpu_variant out, or set it to one of avx5"),
    ):
        with pytest.raises(UnusableVariant) as failure:
            machine.start(asked)
        assert said in str(failure.value)
        assert str(failure.value).endswith("set it to one of avx512_vnni, portable)")


def test_the_names_that_a_setting_may_have_are_those_that_there_are():
    assert set(get_args(CpuVariant)) == BY_NAME.keys()


def test_build_kernels_says_which_and_why(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(build, "load_chosen", machine.start)
    machine.rates = INTEL
    assert build.main([]) == 0
    assert capsys.readouterr().out == (
        "the kernels for avx512_vnni are ready (bf16 by FMA, 95 GFLOP/s on one core; VDPBF16PS makes 35 GFLOP/s)\n"
    )
    assert build.main(["--cpu-variant", "avx2"]) == 0
    assert capsys.readouterr().out == "the kernels for avx2 are ready (as asked for)\n"
    assert build.main(["--cpu-variant", "sse9"]) == 1
    assert "quire build-kernels: the kernels are not made for sse9" in capsys.readouterr().err
    machine.refused = set(BY_NAME)
    assert build.main([]) == 1


def test_a_named_instruction_set_is_a_requirement_of_every_kernel_set():
    kv = KVFormat(head_dim=64, block_size=16)
    cpu = torch.device("cpu")
    served = select(cpu, torch.bfloat16, kv=kv, threads=1)
    asked = select(cpu, torch.bfloat16, kv=kv, threads=1, cpu_variant=served.variant)
    assert (asked.name, asked.variant) == ("cpu", served.variant)
    assert asked.why_variant.startswith("as asked for; ")
    assert not served.why_variant.startswith(("as asked for", "; "))
    for dtype, said in (
        (torch.float32, "in bfloat16, not in float32 (set dtype to bfloat16); "),
        (torch.bfloat16, "the cpu kernels are not made for sse9 on this machine (leave cpu_variant out"),
    ):
        with pytest.raises(ValueError, match="the reference kernels are not compiled for sse9") as failure:
            select(cpu, dtype, kv=kv, threads=1, cpu_variant="sse9")
        assert said in str(failure.value)


def test_the_real_thing_measures_in_a_moment(tmp_path: Path):
    """In a process without torch, as `quire build-kernels` is one."""
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = {json.dumps([str(Path(choice.__file__).parents[2])])}
from quire_kernels.cpu import choice, rates
first, again = (choice.load_chosen() for _ in range(2))
assert "torch" not in sys.modules
print(first.variant.name, again.variant.name, first.library.quire_variant().decode())
found = rates.core_rates(first.library)
assert found.fp32 > 1e7 and (found.bf16 > 1e7) == bool(rates.instruction(first.library, "bf16"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True, env=dict(os.environ)
    )
    first, again, told = done.stdout.split()
    assert first == again == told
