"""Programs that judge servers: lm-eval's scoring, schemathesis on our OpenAPI document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from clients.conftest import KEY, MODEL
from e2e.served import Served

CONFIG = Path(__file__).parents[1] / "hostile" / "schemathesis.toml"
TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: ["Paris", "Tokyo", "Rome", "Madrid"]
doc_to_target: "{{{{right}}}}"
metric_list:
  - metric: acc
"""


def test_lm_eval_scores_by_echo(server: Served, tmp_path: Path) -> None:
    """The model knows these capitals: by chance one of four would be right."""
    questions = [("France", 0), ("Japan", 1), ("Italy", 2), ("Spain", 3)]
    data = tmp_path / "capitals.json"
    data.write_text("\n".join(json.dumps({"country": country, "right": right}) for country, right in questions))
    (tmp_path / "capitals.yaml").write_text(TASK.format(file=data))
    arguments = (
        f"base_url={server.url}/v1/completions,model={MODEL},tokenizer_backend=remote,auth_token={KEY},num_concurrent=4"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments),
            *("--include_path", str(tmp_path), "--tasks", "capitals", "--output_path", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(result.read_text())["results"]["capitals"]["acc,none"] == 1.0


def test_schemathesis_finds_no_server_error(server: Served) -> None:
    """Requests made from our own document: no 5xx but for a client's own deadline, no status that is not documented."""
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(CONFIG)),
            *("run", f"{server.url}/openapi.json"),
            *("-H", f"Authorization: Bearer {KEY}", "--max-examples", "10", "--seed", "1", "--workers", "1"),
            *("--checks", "not_a_server_error,status_code_conformance,response_schema_conformance"),
            "--request-timeout=60",
        ],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-30000:]
    assert httpx.get(f"{server.url}/health").status_code == 200
