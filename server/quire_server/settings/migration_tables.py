"""The fates of each flag of llama-server, SGLang and TGI, and of each of Ollama's variables: the tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quire_server.settings.migration import (
    Server,
    in_requests,
    nothing,
    of_requests,
    one_of,
    refused,
    setting_row,
    switched,
    unless,
)

_OWN_FORMAT = "weights are computed in the format of their file; --quantization int8 or int4 converts at load"
_SAMPLING = "requests say it, and --override-generation-config for those that do not"
_DEFAULT = "for requests that bring none"
_THREADS = "threads are placed by the engine; --num-threads is their number"
_KERNELS = "the kernels for a machine are chosen by what it has; --kernels and --cpu-variant name others"
_DRAFTS = "guessed tokens change no answer here, and their number is found while the server runs: see --speculation"
_NO_MEDIA = "only text is computed"
_NO_UI = "a chat is at /, which needs no setting"
_NODES = "several machines are a front and nodes: see docs/nodes.md"
_ONE_MACHINE = "ranks of one machine compute a model, with --tensor-parallel-size"
_NO_CODE = "no code that is not the server's is run"
_ADDRESS = "HOST:PORT becomes --host and --port"


def _ollama_host(values: Sequence[str]) -> Sequence[str]:
    address = values[0].split("://")[-1].rstrip("/")
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, "11434"
    if not port.isdecimal():
        raise ValueError("expected HOST:PORT")
    return ("--host", host or "0.0.0.0", "--port", port)


def _speculate(values: Sequence[str]) -> Sequence[str]:
    return () if values[:1] == ["0"] else ("--speculation", "auto")


def _draft(values: Sequence[str]) -> Sequence[str]:
    if len(values) != 1:
        raise ValueError("expected a model")
    return ("--speculation", f"model:{values[0]}")


def _lora_tgi(values: Sequence[str]) -> Sequence[str]:
    """`a=path,b=path`, or names on the Hub, which are not fetched."""
    listed = [each for value in values for each in value.split(",")]
    if not all("=" in each for each in listed):
        raise ValueError("expected NAME=DIRECTORY; adapters are read from directories")
    return ("--enable-lora", "--lora-modules", *listed)


def _lora_sglang(values: Sequence[str]) -> Sequence[str]:
    if not values or not all("=" in each for each in values):
        raise ValueError("expected NAME=DIRECTORY; adapters are read from directories")
    return ("--enable-lora", "--lora-modules", *values)


def _first_of_two(values: Sequence[str]) -> Sequence[str]:
    """TGI's shards."""
    return () if values[:1] == ["1"] else ("--tensor-parallel-size", *values)


_HOST_CACHE = "on a GPU --swap-space adds memory of the host to the cache; on a CPU --kv-memory is that memory, and --kv-offload-dir adds files"
_LLAMA_CACHE: Mapping[str, str | None] = MappingProxyType({"f16": None, "bf16": None, "q8_0": "int8"})
_CACHE_ELSE = "the KV cache is the model's type (f16, bf16) or int8 (q8_0)"

LLAMA_SERVER = Server(
    name="llama-server",
    title="llama-server",
    version="llama.cpp as llama-cpp-python 0.3.36 has it",
    defaults=MappingProxyType({"port": "8080"}),
    optional=frozenset(("-fa", "--flash-attn", "-rea", "--reasoning", "-fit", "--fit")),
    switches=frozenset(
        ["-v", "--verbose", "--log-verbose", "--log-jsonl", "--no-cache-prompt", "--spec-default", "-e", "--escape", "--no-escape", "--perf", "--no-perf", "-cb", "--cont-batching", "--repack", "-nr", "--no-repack", "--no-host", "--op-offload", "--no-op-offload", "--warmup", "--no-warmup", "-bs", "--backend-sampling", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "--check-tensors", "--swa-full", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "--cache-idle-slots", "--no-cache-idle-slots", "--cache-prompt", "--context-shift", "--no-context-shift", "--offline", "--jinja", "--no-jinja", "--skip-chat-parsing", "--no-skip-chat-parsing", "--prefill-assistant", "--no-prefill-assistant", "--metrics", "--props", "--slots", "--no-slots", "--ui", "--webui", "--no-ui", "--no-webui", "--reuse-port", "--embedding", "--embeddings", "--rerank", "--reranking", "--spm-infill", "--mlock", "--mmap", "--no-mmap", "--log-prefix", "--log-timestamps", "--no-log-prefix", "--no-log-timestamps", "--log-disable", "--cors-credentials", "--no-cors-credentials", "-cl", "--cache-list", "--completion-bash", "--list-devices", "-h", "--help", "--usage", "--version", "--ignore-eos", "-sp", "--special", "--no-mmproj"]),
    rows=(
        setting_row("-m --model", "model"),
        setting_row("-hf -hfr --hf-repo", "model", "a name on the Hub with the file's tag: user/model:Q4_K_M"),
        setting_row("-a --alias", "served_model_name", convert=lambda v: ("--served-model-name", *",".join(v).split(","))),
        setting_row("-c --ctx-size", "max_model_len", "of each request, not shared among slots", unless("max_model_len", ["0"])),
        setting_row("-np --parallel", "max_num_seqs", convert=unless("max_num_seqs", ["-1", "0"])),
        setting_row("-b --batch-size", "max_num_batched_tokens"),
        setting_row("-t --threads", "num_threads", convert=unless("num_threads", ["-1", "0"])),
        setting_row("-ctk --cache-type-k -ctv --cache-type-v", "kv_cache_dtype", "keys and values have one type", one_of("kv_cache_dtype", _LLAMA_CACHE, _CACHE_ELSE)),
        nothing("-cram --cache-ram", _HOST_CACHE),
        setting_row("-dev --device", "device", "", one_of("device", {"none": "cpu"}, "expected none; a GPU is taken where there is one")),
        setting_row("-s --seed", "seed", convert=unless("seed", ["-1"])),
        setting_row("--host", "host"),
        setting_row("--port", "port"),
        setting_row("--api-prefix", "root_path"),
        setting_row("--api-key", "api_key", convert=lambda v: ("--api-key", *",".join(v).split(","))),
        setting_row("--api-key-file", "api_key_file"),
        setting_row("--ssl-key-file", "ssl_keyfile"),
        setting_row("--ssl-cert-file", "ssl_certfile"),
        setting_row("--cors-origins", "allowed_origins", convert=lambda v: ("--allowed-origins", *",".join(v).split(","))),
        setting_row("--chat-template-file", "chat_template"),
        setting_row("--chat-template-kwargs", "default_chat_template_kwargs"),
        setting_row("-to --timeout", "client_write_timeout", "for a client that does not read"),
        setting_row("--pooling", "pooling", "", one_of("pooling", {"mean": "mean", "last": "last", "none": "none"}, "mean, last or none")),
        setting_row("-md --model-draft --spec-draft-model", "speculation", "", _draft),
        setting_row("--spec-type", "speculation", "", one_of("speculation", {"none": "off", **dict.fromkeys(
            ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "auto")}, "none or an ngram; a draft model is --model-draft")),
        setting_row("--spec-default", "speculation", "", lambda _: ("--speculation", "auto")),
        setting_row("-v --verbose --log-verbose", "log_level", "", lambda _: ("--log-level", "debug")),
        setting_row("--log-jsonl", "log_format", "", lambda _: ("--log-format", "json")),
        setting_row("--no-cache-prompt", "enable_prefix_caching", "", switched("enable_prefix_caching", on=False)),
        setting_row("--lora", "lora_modules", "of the form NAME=DIRECTORY, and not of GGUF files", _lora_tgi),
        setting_row("-n --predict --n-predict", "override_generation_config", "for requests without max_tokens, and the most that others get",
            of_requests("max_new_tokens", ["-1", "-2"])),
        setting_row("--temp --temperature", "override_generation_config", _DEFAULT, of_requests("temperature")),
        setting_row("--top-k", "override_generation_config", _DEFAULT, of_requests("top_k")),
        setting_row("--top-p", "override_generation_config", _DEFAULT, of_requests("top_p")),
        setting_row("--min-p", "override_generation_config", _DEFAULT, of_requests("min_p")),
        setting_row("--repeat-penalty", "override_generation_config", _DEFAULT, of_requests("repetition_penalty")),
        in_requests("--presence-penalty --frequency-penalty", "is a field of requests: presence_penalty, frequency_penalty"),
        in_requests("--ignore-eos -l --logit-bias -r --reverse-prompt -sp --special", "is a field of requests: ignore_eos, logit_bias, stop, skip_special_tokens"),
        in_requests("--grammar --grammar-file -j --json-schema -jf --json-schema-file", "is a field of requests: response_format, guided grammars"),
        in_requests("-rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message --reasoning-preserve "
            "--no-reasoning-preserve", "is a field of requests: reasoning_effort, thinking"),
        nothing("-h --help --usage --version -cl --cache-list --completion-bash --list-devices", "it prints and ends; see quire --help"),
        nothing("-tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb "
            "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch --numa --threads-http", f"{_THREADS}"),
        nothing("-ub --ubatch-size --perf --no-perf -e --escape --no-escape -fa --flash-attn --repack -nr --no-repack --no-host "
            "--op-offload --no-op-offload -dt --defrag-thold -cb --cont-batching --warmup --no-warmup -bs --backend-sampling", _KERNELS),
        setting_row("-ngl --gpu-layers --n-gpu-layers", "device", "a model is computed whole on one device: 0 is --device cpu, other numbers change nothing",
            lambda v: ("--device", "cpu") if v[:1] == ["0"] else ()),
        nothing("-kvo --kv-offload -nkvo --no-kv-offload -fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors "
            "-sm --split-mode -mg --main-gpu", "a model is computed whole on one device, whose memory the plan of a start divides"),
        nothing("--keep --swa-full --kv-unified-per-slot -kvu --kv-unified -no-kvu --no-kv-unified -ctxcp --ctx-checkpoints "
            "--swa-checkpoints -cms --checkpoint-min-step --cache-idle-slots --no-cache-idle-slots -sps --slot-prompt-similarity "
            "--cache-prompt --cache-reuse --context-shift --no-context-shift", "blocks are pooled, and every request may begin with any prefix that is kept"),
        nothing("-lm --load-mode -lzm --lazy-mode --mlock --mmap --no-mmap", "packed weights are kept in files: see --packed-cache"),
        nothing("--log-* --no-log-* -lv --verbosity", "the log is on stderr; --log-level and --log-format say how"),
        nothing("--offline", "models that the cache has are not asked for; HF_HUB_OFFLINE=1 keeps the network out"),
        nothing("--jinja --skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant", "chat templates are Jinja, and fields of requests say the rest"),
        nothing("--reasoning-format", "thoughts are apart from the answer where the model's format is known; --reasoning-parser names one"),
        nothing("--metrics --props --slots --no-slots --ui --webui --no-ui --no-webui --ui-config --webui-config --ui-config-file "
            "--webui-config-file", f"/metrics, /debug and the pages are always there; {_NO_UI}"),
        nothing("--sse-ping-interval", "a silent stream gets a comment line every 15 s"),
        nothing("--reuse-port", "--api-server-count shares a port among processes"),
        nothing("--cors-methods --cors-headers --cors-credentials --no-cors-credentials", "they follow from --allowed-origins"),
        nothing("--embedding --embeddings --rerank --reranking --embd-normalize --spm-infill", "the routes are there where the model can do it"),
        nothing("--tags", "it names nothing that is served"),
        nothing("--spec-* --draft* --threads-draft --cpu-*-draft --prio-draft --poll-draft --prio-batch-draft --poll-batch-draft "
            "--override-tensor-draft --cpu-moe-draft --n-cpu-moe-draft --gpu-layers-draft --n-gpu-layers-draft --device-draft "
            "--cpu-mask-batch-draft --cpu-strict-batch-draft --threads-batch-draft --cache-type-k-draft --cache-type-v-draft "
            "-ctkd -ctvd -td -tbd -Cd -Crd -Cbd -otd -cmoed -ncmoed -devd -ngld", _DRAFTS),
        nothing("--no-spec-draft-backend-sampling", _DRAFTS),
        refused("--rope-* --yarn-*", "positions are scaled as the model's file says"),
        refused("--rpc -ts --tensor-split", _NODES),
        refused("-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn", "a model is computed on one device"),
        refused("--override-kv", "the file's metadata are taken as they are"),
        refused("--lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range --lora-init-without-apply",
            "adapters are plain LoRA, whose scale is their own: --lora-modules"),
        refused("-mu --model-url -dr --docker-repo -hff --hf-file", "name a file, a directory, or a repository of the Hub with a tag"),
        refused("-hft --hf-token", "set HF_TOKEN: what is on a command line others can read"),
        refused("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "name a directory: --model-draft"),
        refused("--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma --xtc-* --typical --typical-p --repeat-last-n "
            "--dry-* --adaptive-* --dynatemp-* --mirostat*", "sampling has temperature, top_k, top_p, min_p and penalties over the whole text"),
        refused("-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", "guesses come from the text and from earlier answers: --speculation auto"),
        refused("-mm --mmproj --mmproj-* --no-mmproj* -mmu -mmdev --image-* --mtmd-* --video-* --media-path --vision-*", _NO_MEDIA),
        refused("--path --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime --mcp-* "
            "-ag --agent -no-ag --no-agent", _NO_CODE),
        refused("--chat-template", "only files are read: --chat-template-file"),
        refused("--no-jinja", "chat templates are Jinja"),
        refused("-nocb --no-cont-batching", "requests are always batched as they come"),
        refused("--slot-save-path", "prompts are kept in files by --kv-offload-dir"),
        refused("--models-* --no-models-autoload --sleep-idle-seconds", "several models are named by --models FILE, with idle_seconds for each"),
        refused("--log-prompts-dir", "prompts are never written"),
        refused("--embd-gemma-default --fim-* --gpt-oss-*", "name the model with --model"),
    ),
)  # fmt: skip

SGLANG = Server(
    name="sglang",
    title="SGLang",
    version="SGLang 0.5.23",
    defaults=MappingProxyType({"port": "30000"}),
    rows=(
        setting_row("--model-path --model", "model"),
        setting_row("--tokenizer-path", "tokenizer"),
        setting_row("--revision", "revision"),
        setting_row("--download-dir", "download_dir"),
        setting_row("--served-model-name", "served_model_name"),
        setting_row("--context-length", "max_model_len"),
        setting_row("--dtype", "dtype", "", one_of("dtype", {
            "auto": None, **{name: name for name in ("half", "float16", "bfloat16", "float", "float32")}}, "auto, float16, bfloat16 or float32")),
        setting_row("--kv-cache-dtype", "kv_cache_dtype", "", one_of("kv_cache_dtype", {"auto": None, "bf16": None, "bfloat16": None, "fp8_e4m3": "fp8"},
            "auto, bf16 or fp8_e4m3; int8 is --kv-cache-dtype int8 here")),
        setting_row("--device", "device", "", one_of("device", {"cuda": "cuda", "cpu": "cpu"}, "cuda or cpu")),
        setting_row("--random-seed", "seed"),
        setting_row("--host", "host"),
        setting_row("--port", "port"),
        setting_row("--fastapi-root-path", "root_path"),
        setting_row("--api-key", "api_key"),
        setting_row("--admin-api-key", "admin_api_key"),
        setting_row("--ssl-keyfile", "ssl_keyfile"),
        setting_row("--ssl-certfile", "ssl_certfile"),
        setting_row("--ssl-ca-certs", "ssl_ca_certs"),
        setting_row("--ssl-keyfile-password", "ssl_keyfile_password"),
        setting_row("--chat-template", "chat_template", "a file; names of built-in templates are not known"),
        setting_row("--default-chat-template-kwargs", "default_chat_template_kwargs"),
        setting_row("--reasoning-parser", "reasoning_parser", "names of formats differ: docs/api.md has ours"),
        setting_row("--tool-call-parser", "tool_call_parser", "names of formats differ: docs/api.md has ours"),
        setting_row("--mem-fraction-static", "gpu_memory_utilization", "of the device's memory, all in all"),
        setting_row("--max-running-requests", "max_num_seqs"),
        setting_row("--max-queued-requests", "max_num_queued_reqs", "those that wait, without those that run"),
        setting_row("--chunked-prefill-size", "prefill_chunk", "", unless("prefill_chunk", ["-1"])),
        setting_row("--max-prefill-tokens", "max_num_batched_tokens", "of a step, decodes included"),
        setting_row("--page-size", "block_size", "", one_of("block_size", {"1": None, **{n: n for n in ("16", "32", "64", "128", "256")}},
            "blocks have 16, 32, 64, 128 or 256 tokens")),
        setting_row("--schedule-policy", "scheduling_policy", "", one_of("scheduling_policy", {"fcfs": "fcfs", "lpm": "lpm"}, "fcfs or lpm")),
        setting_row("--enable-priority-scheduling", "scheduling_policy", "", lambda _: ("--scheduling-policy", "priority")),
        setting_row("--disable-radix-cache", "enable_prefix_caching", "", switched("enable_prefix_caching", on=False)),
        setting_row("--disable-overlap-schedule", "async_scheduling", "", lambda _: ("--async-scheduling", "off")),
        setting_row("--stream-response-default-include-usage", "enable_force_include_usage", "in every chunk too", switched("enable_force_include_usage")),
        setting_row("--enable-deterministic-inference", "deterministic", "on a CPU it is always so", switched("deterministic")),
        setting_row("--tp-size --tensor-parallel-size --tp", "tensor_parallel_size", "each is a process", _first_of_two),
        setting_row("--dp-size --data-parallel-size --dp", "replicas", "", lambda v: () if v[:1] == ["1"] else ("--replicas", *v)),
        setting_row("--load-balance-method", "route_policy", "", one_of("route_policy", {"auto": None, "round_robin": "round_robin",
            "total_requests": "least_requests", "total_tokens": "least_tokens"}, "auto, round_robin, total_requests or total_tokens")),
        setting_row("--enable-lora", "enable_lora", "", switched("enable_lora")),
        setting_row("--lora-paths", "lora_modules", "of the form NAME=DIRECTORY", _lora_sglang),
        setting_row("--max-lora-rank", "max_lora_rank"),
        setting_row("--max-loras-per-batch", "max_loras"),
        setting_row("--max-loaded-loras", "max_cpu_loras"),
        setting_row("--speculative-draft-model-path --speculative-draft-model", "speculation", "", _draft),
        setting_row("--speculative-algorithm", "speculation", "", one_of("speculation",
            {"NGRAM": "auto", "STANDALONE": None}, "NGRAM, or STANDALONE with --speculative-draft-model-path; EAGLE and NEXTN heads are not supported")),
        setting_row("--log-level", "log_level"),
        setting_row("--log-requests", "enable_log_requests", "", switched("enable_log_requests")),
        setting_row("--enable-response-store", "response_store_size", "they are stored anyway", lambda _: ()),
        setting_row("--sampling-defaults", "generation_config", "", one_of("generation_config", {"model": None, "openai": "none"}, "model or openai")),
        setting_row("--preferred-sampling-params", "override_generation_config"),
        setting_row("--otlp-traces-endpoint", "otlp_traces_endpoint", "over HTTP, with a path: http://collector:4318/v1/traces",
            lambda v: ("--otlp-traces-endpoint", v[0] if "://" in v[0] else f"http://{v[0]}")),
        setting_row("--kv-events-config", "kv_events_config", "with vLLM's keys"),
        setting_row("--watchdog-timeout", "engine_hang_timeout"),
        nothing("--trust-remote-code --tokenizer-mode --tokenizer-backend --load-format --model-impl --model-config-parser --config "
            "--model-loader-extra-config --weight-loader-* --startup-weight-load-mode --weight-cache-* --weight-version", "nothing remote is run, and safetensors and GGUF files are read"),
        nothing("--*-backend --*-backend-* --disable-cuda-graph* --cuda-graph-* --enable-torch-compile* --torch-compile-* "
            "--disable-prefill-cuda-graph --disable-decode-cuda-graph --enable-profile-cuda-graph --enable-cudagraph-gc --debug-cuda-graph "
            "--triton-attention-* --flashinfer-* --disable-flashinfer-* --enable-flashinfer-* --enforce-disable-flashinfer-* --disable-custom-all-reduce "
            "--enable-nccl-nvls --enable-symm-mem --enable-mscclpp --enable-torch-symm-mem --pre-warm-nccl --enable-fused-* --enable-tf32-matmul "
            "--enable-aiter-* --disable-aiter-* --enable-nvidia-megakernel --enable-amd-monokernel --enable-lean-attention --nccl-port "
            "--enable-p2p-check --numa-node --context-bucket", _KERNELS),
        nothing("--stream-interval", "tokens are sent as they come"),
        nothing("--*-worker-num --skip-server-warmup --warmups --schedule-conservativeness --num-continuous-decode-steps "
            "--scheduler-recv-interval --enable-mixed-chunk --enable-dynamic-chunking --prefill-* --enable-prefill-delayer "
            "--enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-* --enable-tokenizer-batch-encode --disable-tokenizer-batch-decode "
            "--batch-notify-size --incremental-streaming-output --min-free-slots-delay --disable-chunked-prefix-cache --sleep-on-idle --gc-threshold "
            "--retraction-policy --max-total-tokens --disable-priority-preemption --priority-scheduling-preemption-threshold "
            "--swa-* --disable-hybrid-swa-memory --max-mamba-cache-size --mamba-* --uses-mamba-radix-cache --radix-* --enable-page-major-kv-layout "
            "--enable-unified-memory --enable-session-radix-cache", "the scheduler and the pool find it by themselves; SERVING.md says how"),
        nothing("--enable-metrics* --*-buckets --bucket-* --log-* --uvicorn-* --show-time-cost --decode-log-interval --enable-cache-report "
            "--enable-request-time-stats-logging --gc-warning-threshold-secs --soft-watchdog-timeout --enable-mfu-metrics --crash-dump-folder "
            "--export-metrics-* --extra-metric-labels --tokenizer-metrics-* --stat-loggers --load-* --enable-trace --trace-modules --otlp-service-name "
            "--enable-layerwise-nvtx-marker", "/metrics, /debug and the log are always there"),
        nothing("--enable-http-worker-reuseport --enable-http2 --http2-* --enable-ssl-refresh --grpc-* --enable-streaming-session "
            "--file-storage-path --return-input-ids --return-output-ids", "connections are HTTP/1.1, certificates are read again on SIGHUP, and requests ask for token ids"),
        nothing("--constrained-json-* --disable-outlines-disk-cache --enable-strict-thinking --strip-thinking-cache", "grammars are computed by llguidance, and allow what the schema allows"),
        nothing("--speculative-* --spec-trace-dir --enable-multi-layer-eagle", _DRAFTS),
        nothing("--lora-* --enable-lora-overlap-loading --max-lora-chunk-size --experts-shared-outer-loras", "adapters of one batch run together, loaded as they are asked for"),
        nothing("--enable-hierarchical-cache --enable-hicache --hicache-*", _HOST_CACHE),
        refused("--quantization --quantization-param-path --quantize-and-serve --modelopt-* --rl-*", _OWN_FORMAT),
        refused("--is-embedding --skip-tokenizer-init --json-model-override-args --allow-auto-truncate --default-priority-value "
            "--schedule-low-priority-values-first --abort-on-priority-when-disabled", "what a model is its files say, and a request's length and class are checked as they come"),
        refused("--pp-* --pipeline-parallel-size --pp --ep* --expert-parallel-size --moe-* --attn-* --attention-* --dcp-* --decode-context-parallel-size "
            "--dwdp-size --cp-* --enable-cp-* --enable-prefill-cp --enable-dp-* --enable-tp-* --enable-attn-* --enable-shared-* --shared-* "
            "--enable-dense-* --enable-layernorm-sp --enable-megamoe-* --disable-attn-tp-gather --elastic-* --max-ep-size --enable-eplb "
            "--eplb-* --expert-* --init-expert-location --deepep-* --fuseep-mode --enable-elastic-* --mooncake-* --enable-waterfill "
            "--disable-shared-experts-fusion --enforce-shared-experts-fusion --enable-two-batch-overlap --enable-single-batch-overlap --tbo-* "
            "--enable-w4a4-* --enable-kv-cache-sharding --enable-dsa-* --dsa-* --dsv4-* --boundary-reduction --enable-quant-communications", _ONE_MACHINE),
        refused("--nnodes --node-rank --dist-* --nccl-init-addr --gated-launch-port --use-ray --base-gpu-id --gpu-id-step --disaggregation-* "
            "--num-reserved-decode-tokens --optimistic-prefill-attempts --enable-pd* --pdmux-* --sm-group-num --smg-* --sidecar* --decoupled-*", _NODES),
        refused("--language-* --encoder-* --enable-adaptive-* --mm-* --enable-mm-* --enable-multimodal --enable-broadcast-* --enable-prefix-mm-cache "
            "--allowed-media-domains --media-* --trust-mm-* --limit-mm-* --image-* --disable-fast-image-processor --asr-* --enable-precise-*", _NO_MEDIA),
        refused("--forward-hooks --custom-* --enable-custom-logit-processor --tool-server --trust-request-chat-template --debug-tensor-* --msprobe-* --kv-canary*", _NO_CODE),
        refused("--completion-template --hf-chat-template-name", "completions take the prompt as it is, and a template is a file: --chat-template"),
        refused("--cpu-offload-gb --offload-* --ple-* --kt-* --enable-paged-experts --paged-experts-* --enable-memory-saver --enable-*weights-cpu-backup "
            "--enable-lmcache --lmcache-* --enable-flexkv --flexkv-* --enable-unified-cache-* --unified-cache-* --enable-linker-* --enable-hisparse "
            "--hisparse-config --hierarchical-sparse-*", "weights stay where they are computed, and the cache is the server's own"),
        refused("--remote-instance-* --engine-info-* --modelexpress-* --model-checksum --delete-ckpt-* --decrypted-* --checkpoint-engine-*", "weights are read from a directory or the Hub"),
        refused("--enable-return-* --return-* --aux-* --watermark-* --enable-watermark --dllm-* --enable-mamba-* --int8-mamba-* --enable-int8-* "
            "--linear-* --enable-linear-* --enable-encoder-* --enable-decoder-* --forward-pass-* --enable-forward-pass-metrics --c128-page-size "
            "--enable-deepseek-* --enable-fp32-lm-head --enable-mis --enable-scattered-sconv --qsa-* --sampling-mask-* --uno-*", "nothing here does it"),
    ),
)  # fmt: skip

TGI = Server(
    name="tgi",
    title="TGI",
    version="text-generation-inference's launcher.md",
    defaults=MappingProxyType({"port": "3000", "host": "0.0.0.0"}),
    rows=(
        setting_row("--model-id", "model"),
        setting_row("--revision", "revision"),
        setting_row("--num-shard", "tensor_parallel_size", "each is a process", _first_of_two),
        setting_row("--dtype", "dtype"),
        setting_row("--kv-cache-dtype", "kv_cache_dtype", "", one_of("kv_cache_dtype", {"fp8_e4m3fn": "fp8"}, "fp8_e4m3fn; int8 is --kv-cache-dtype int8 here")),
        setting_row("--speculate", "speculation", "how many tokens are guessed is found while the server runs", _speculate),
        setting_row("--max-concurrent-requests", "max_num_queued_reqs", "those that wait, without those that run"),
        setting_row("--max-top-n-tokens", "max_logprobs"),
        setting_row("--max-total-tokens", "max_model_len"),
        setting_row("--max-batch-prefill-tokens", "max_num_batched_tokens", "of a step, decodes included"),
        setting_row("--max-batch-size", "max_num_seqs"),
        setting_row("--hostname", "host"),
        setting_row("-p --port", "port"),
        setting_row("--huggingface-hub-cache --weights-cache-override", "download_dir"),
        setting_row("--cuda-memory-fraction", "gpu_memory_utilization"),
        setting_row("--json-output", "log_format", "", lambda _: ("--log-format", "json")),
        setting_row("--otlp-endpoint", "otlp_traces_endpoint", "over HTTP, not gRPC: http://collector:4318/v1/traces"),
        setting_row("--cors-allow-origin", "allowed_origins", "", lambda v: ("--allowed-origins", *",".join(v).split(","))),
        setting_row("--api-key", "api_key"),
        setting_row("--tokenizer-config-path", "tokenizer", "the directory with the file"),
        setting_row("--lora-adapters", "lora_modules", "of the form NAME=DIRECTORY", _lora_tgi),
        setting_row("--payload-limit", "max_body_bytes"),
        setting_row("-g --graceful-termination-timeout", "drain_timeout"),
        in_requests("--max-best-of --max-stop-sequences --max-client-batch-size", "has a fixed bound here, which docs/api.md names"),
        nothing("--sharded", "--num-shard alone says it"),
        nothing("--trust-remote-code", "nothing remote is run"),
        nothing("--validation-workers", "texts are encoded by threads, long ones by processes"),
        nothing("--max-input-tokens --max-input-length", "a prompt may have what --max-total-tokens leaves"),
        nothing("--max-batch-total-tokens", "the pool of blocks bounds it: --kv-memory or --gpu-memory-utilization"),
        nothing("--waiting-served-ratio --max-waiting-tokens", "new requests enter between steps, and prompts are computed beside decodes"),
        nothing("--cuda-graphs --disable-custom-kernels", _KERNELS),
        nothing("--prometheus-port", "/metrics is on the server's own port"),
        nothing("--shard-uds-path --master-addr --master-port", "ranks have links of their own"),
        nothing("--otlp-service-name --usage-stats", "nothing is sent to anybody, and a service is named by OTEL_SERVICE_NAME"),
        nothing("--disable-grammar-support --enable-prefill-logprobs", "requests ask for it"),
        nothing("-e --env -h --help", "it prints and ends; see quire --help"),
        refused("--quantize", _OWN_FORMAT),
        refused("--rope-scaling --rope-factor", "positions are scaled as config.json says"),
        refused("--watermark-gamma --watermark-delta", "answers are not marked"),
        refused("--ngrok --ngrok-authtoken --ngrok-edge", "put a proxy of yours in front"),
    ),
)  # fmt: skip

OLLAMA = Server(
    name="ollama",
    title="Ollama",
    version="Ollama's envconfig",
    has_variables=True,
    defaults=MappingProxyType({"port": "11434"}),
    rows=(
        setting_row("OLLAMA_HOST", "host", _ADDRESS, _ollama_host),
        setting_row("OLLAMA_CONTEXT_LENGTH", "max_model_len", "", unless("max_model_len", ["0"])),
        setting_row("OLLAMA_NUM_PARALLEL", "max_num_seqs", "", unless("max_num_seqs", ["0"])),
        setting_row("OLLAMA_MAX_QUEUE", "max_num_queued_reqs", "a full queue is 429 with Retry-After, not 503"),
        setting_row("OLLAMA_KV_CACHE_TYPE", "kv_cache_dtype", "", one_of("kv_cache_dtype", _LLAMA_CACHE, _CACHE_ELSE)),
        setting_row("OLLAMA_ORIGINS", "allowed_origins", "", lambda v: ("--allowed-origins", *v[0].split(","))),
        setting_row("OLLAMA_MODELS", "download_dir", "of models from the Hub; Ollama's own files are not read"),
        setting_row("OLLAMA_DEBUG", "log_level", "", lambda v: () if v[0] in ("", "0", "false") else ("--log-level", "debug")),
        nothing("OLLAMA_KEEP_ALIVE OLLAMA_LOAD_TIMEOUT OLLAMA_MAX_LOADED_MODELS", "a model alone stays loaded as long as the server runs; several have idle_seconds and --model-memory"),
        nothing("OLLAMA_FLASH_ATTENTION OLLAMA_LLM_LIBRARY OLLAMA_VULKAN OLLAMA_IGPU_ENABLE OLLAMA_SCHED_SPREAD", _KERNELS),
        nothing("OLLAMA_GPU_OVERHEAD", "--gpu-memory-utilization says how much is taken"),
        nothing("OLLAMA_GO_TEMPLATE", "chat templates are the checkpoint's, in Jinja: --chat-template"),
        nothing("OLLAMA_NOHISTORY OLLAMA_EDITOR OLLAMA_NOPRUNE OLLAMA_MAX_TRANSFER_STREAMS OLLAMA_NO_CLOUD OLLAMA_REMOTES OLLAMA_AUTH",
            "there is no client, and no cloud, beside the server"),
        refused("OLLAMA_DEBUG_LOG_REQUESTS", "prompts are never written"),
    ),
)  # fmt: skip

SERVERS: Mapping[str, Server] = MappingProxyType({each.name: each for each in (OLLAMA, LLAMA_SERVER, SGLANG, TGI)})
