"""The arithmetic behind the plan: what the machine has, what the pool gets, what the operator reads."""

import dataclasses

import pytest

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.plan import EnginePlan, MachinePart, ModelPart, PoolPart
from quire_engine.machine import available_memory, num_oom_kills, usable_cores
from quire_engine.memory_plan import (
    bytes_text,
    check_model_len,
    cpu_pool_bytes,
    gpu_pool_bytes,
    plan_text,
    size_pool,
)
from support.plans import changed

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n"


def machine(tmp_path, cgroup, files):
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_machine_without_cgroups_has_what_the_kernel_calls_available(tmp_path):
    assert available_memory(machine(tmp_path, "", {})) == 8 * GIB


def test_the_tightest_of_the_enclosing_version_2_groups_counts(tmp_path):
    root = machine(
        tmp_path,
        "0::/pod/worker\n",
        {
            "sys/fs/cgroup/pod/worker/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {1 * GIB}\n",
        },
    )
    assert available_memory(root) == 2 * GIB


def test_a_version_1_group_seen_from_inside_a_container(tmp_path):
    root = machine(
        tmp_path,
        "4:memory:/docker/0123\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
        },
    )
    assert available_memory(root) == 3 * GIB // 2


def test_an_exceeded_limit_leaves_nothing(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n"}
    assert available_memory(machine(tmp_path, "0::/\n", files)) == 0


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}),
        (
            "3:cpu,cpuacct:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "20000 100000\n"}),
    ],
)
def test_a_cpu_quota_limits_the_cores_to_one_at_least(tmp_path, cgroup, files):
    assert usable_cores(machine(tmp_path, cgroup, files)) == 1


def test_no_quota_leaves_the_affinity_mask(tmp_path):
    assert usable_cores(machine(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"})) >= 1
    assert usable_cores() >= 1
    assert available_memory() > 0


def test_kills_for_lack_of_memory_are_counted_where_the_kernel_tells_of_them(tmp_path):
    root = machine(tmp_path, "0::/\n", {"proc/vmstat": "nr_free_pages 7\noom_kill 12\nnuma_hit 3\n"})
    assert num_oom_kills(root) == 12
    (root / "proc/vmstat").write_text("nr_free_pages 7\n")
    assert num_oom_kills(root) is None


def test_the_cpu_pool_is_a_bounded_share_of_what_is_free():
    assert cpu_pool_bytes(8 * GIB, None) == 2 * GIB
    assert cpu_pool_bytes(64 * GIB, None) == 4 * GIB
    assert cpu_pool_bytes(64 * GIB, 20 * GIB) == 20 * GIB
    with pytest.raises(ConfigError, match=f"set kv_memory to {GIB} or less"):
        cpu_pool_bytes(GIB, 2 * GIB)


def test_the_gpu_pool_is_the_share_minus_weights_and_workspace():
    sizes = {"total": 80 * GIB, "free": 64 * GIB, "workspace": 2 * GIB}
    assert gpu_pool_bytes(**sizes, utilization=0.9, kv_memory=None) == 72 * GIB - 16 * GIB - 2 * GIB
    assert gpu_pool_bytes(**sizes, utilization=1.0, kv_memory=None) == 62 * GIB
    assert gpu_pool_bytes(**sizes, utilization=0.9, kv_memory=GIB) == GIB
    with pytest.raises(ConfigError, match=f"set kv_memory to {62 * GIB} or less"):
        gpu_pool_bytes(**sizes, utilization=0.9, kv_memory=63 * GIB)


def test_a_gpu_share_below_the_weights_names_one_that_works():
    sizes = {"total": 80 * GIB, "free": 64 * GIB, "workspace": 2 * GIB, "kv_memory": None}
    with pytest.raises(ConfigError, match=r"set gpu_memory_utilization to 0\.24 or more"):
        gpu_pool_bytes(**sizes, utilization=0.2)
    assert gpu_pool_bytes(**sizes, utilization=0.24) > 0
    with pytest.raises(ConfigError, match="use a larger GPU"):
        gpu_pool_bytes(total=16 * GIB, free=GIB, workspace=2 * GIB, utilization=0.9, kv_memory=None)


def sized(pool_bytes, **changes):
    arguments = {
        "pool_bytes": pool_bytes,
        "bytes_per_block": 1000,
        "num_blocks_for": lambda tokens: -(-tokens // 16),
        "max_model_len": None,
        "positions": 2048,
        "max_useful_seqs": None,
    }
    return size_pool(**{**arguments, **changes})


def test_a_length_left_open_is_the_models_or_what_fits():
    assert (sized(128_000).num_blocks, sized(128_000).max_model_len) == (128, 2048)
    assert (sized(127_999).num_blocks, sized(127_999).max_model_len) == (127, 2032)
    assert sized(1000).max_model_len == 16


def test_the_pool_is_capped_at_what_the_sequences_can_use():
    assert sized(10**9, max_model_len=100, max_useful_seqs=8).num_blocks == 8 * 7
    assert sized(10_000, max_model_len=100, max_useful_seqs=8).num_blocks == 10


def test_too_small_a_pool_names_the_length_and_the_memory_that_would_do():
    with pytest.raises(ConfigError) as failure:
        sized(5500, max_model_len=100)
    assert "set max_model_len to 80 or less, or kv_memory to 7000 or more" in str(failure.value)
    assert sized(5500, max_model_len=80).num_blocks == 5
    assert sized(7000, max_model_len=100).num_blocks == 7
    with pytest.raises(ConfigError, match="available; set kv_memory to 1000 or more"):
        sized(999)


def test_a_length_beyond_the_model_names_the_limit():
    with pytest.raises(ConfigError, match="set max_model_len to 2048 or less"):
        check_model_len(2049, 2048)
    check_model_len(2048, 2048)
    check_model_len(None, 1)


PLAN = EnginePlan(
    model=ModelPart(
        path="/models/tiny",
        architecture="LlamaForCausalLM",
        num_parameters=1_234_567,
        vocab_size=1000,
        dtype="float32",
        weights_bytes=4_938_268,
    ),
    machine=MachinePart(device="cpu", kernels="reference", num_threads=2),
    pool=PoolPart(num_bytes=640 * 65536, bytes_per_block=65536),
    scheduler=SchedulerConfig(num_blocks=640, max_model_len=2048),
    load_seconds=1.25,
)


def test_the_plan_reads_in_numbers_an_operator_can_check():
    text = plan_text(PLAN)
    for expected in (
        "LlamaForCausalLM, 1,234,567 parameters",
        "cpu, float32, reference kernels, 2 threads",
        "4.71 MiB, loaded in 1.2 s",
        "40.0 MiB = 640 blocks of 64.0 KiB = 10,240 tokens of 4.00 KiB",
        "5 sequences of 2,048 tokens or 10 of 1,024 tokens; at most 64 run at once",
        "16 sequences of 640 tokens hold 40.0 MiB; reserved at full length they would take 128 MiB",
    ):
        assert expected in text
    assert "2 threads, deterministic" in plan_text(changed(PLAN, machine={"deterministic": True}))
    assert "instructions" not in text
    chosen = changed(PLAN, machine={"cpu_variant": "avx512_vnni", "why_cpu_variant": "bf16 by FMA"})
    assert "\ninstructions     avx512_vnni: bf16 by FMA\nweights " in plan_text(chosen)
    roomy = dataclasses.replace(PLAN, scheduler=SchedulerConfig(num_blocks=64 * 128, max_model_len=2048))
    assert "64 sequences of 640 tokens hold 160 MiB; reserved at full length they would take 512 MiB" in plan_text(
        roomy
    )
    tiny = dataclasses.replace(PLAN, scheduler=SchedulerConfig(num_blocks=1, max_model_len=1))
    assert "1 sequence of 1 token holds 64.0 KiB; reserved at full length it would" in plan_text(tiny)
    assert "4.71 MiB, estimated\n" in plan_text(dataclasses.replace(PLAN, load_seconds=0.0))


def test_the_plan_says_where_adapters_are():
    plan = changed(PLAN, adapters={"max_kept": 4, "max_rank": 16, "num_bytes": 3 << 20})
    assert "at most 4 in memory, of rank 16 or less: 3.00 MiB; 1 run at once" in plan_text(plan)
    of_gpu = plan_text(changed(plan, machine={"device": "cuda"}))
    assert "1 places on the GPU, of rank 16 or less: 3.00 MiB; at most 4 in the host's memory" in of_gpu


def test_byte_counts_keep_three_digits():
    counts = [0, 1023, 1024, 10 * 1024 + 512, 1048575, 100 * 1048576, 3 << 30, 1 << 50]
    texts = ["0 B", "1023 B", "1.00 KiB", "10.5 KiB", "1.00 MiB", "100 MiB", "3.00 GiB", "1024 TiB"]
    assert [bytes_text(count) for count in counts] == texts
