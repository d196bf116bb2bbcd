"""Requests that schemathesis makes from our OpenAPI document, right and wrong ones: `make api-fuzz`.

Promises: exit code 1 where a server error comes, a status or a reply that the document does not have, the engine was
restarted or something is left; and where fewer cases were sent than asked for. Must not know: what is sent.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from e2e.served import Served

KEY = "sk-fuzz"
CONFIG = Path(__file__).with_name("schemathesis.toml")
LEAST = 2000  # cases
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "ignored_auth"),
)
_CASES = re.compile(r"(\d+) generated")


def main() -> int:
    parser = argparse.ArgumentParser(prog="api-fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=60, help="of each operation, beside those of the document")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--least", type=int, default=LEAST, help="cases, or the run has failed")
    wanted = parser.parse_args()
    flags = ("--max-num-seqs", "8", "--api-key", KEY, "--set", "check_invariants=true")
    faults = []
    with Served(*flags) as server:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(CONFIG)),
                *("run", f"{server.url}/openapi.json"),
                *("-H", f"Authorization: Bearer {KEY}", "--max-examples", str(wanted.examples)),
                *("--seed", str(wanted.seed), "--workers", "1", "--mode", "all", "--generation-allow-x00", "true"),
                *("--phases", "examples,coverage,fuzzing,stateful", "--checks", ",".join(CHECKS)),
                # What operators do to a server would end the run.
                *("--exclude-path-regex", "^/admin|_lora_adapter$", "--request-timeout", "60"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout, flush=True)
        if done.returncode:
            faults.append("schemathesis has found what is above")
        cases = sum(map(int, _CASES.findall(done.stdout)))
        if cases < wanted.least:
            faults.append(f"only {cases} cases were sent")
        try:
            server.wait_idle(5.0)
        except AssertionError as error:
            faults.append(str(error))
        if restarts := server.metric("quire_engine_restarts_total"):
            faults.append(f"the engine was restarted {restarts:g} times")
        if "Traceback" in server.log():
            faults.append("the log has a traceback:\n" + server.log()[server.log().index("Traceback") :][:3000])
    for fault in faults:
        print(f"BROKEN: {fault}")
    print(f"{cases} cases, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
