"""The Triton kernels on a CUDA GPU: right first, then fast, beside torch's attention and the measured copy bandwidth.

    python benchmarks/kernel_speed.py [--out FILE] [--seconds 55] [--only decode quest ...]

Shapes are those of one layer of Llama-3.1-8B (8 KV heads, 32 query heads, 128 channels, bfloat16). Every kernel passes
a comparison with its reference before it is timed; one that fails is reported and not timed. Times are medians over
replays of a CUDA graph that calls the kernel on several copies of its input, so that neither launches nor the L2 cache
count. Sweeps over launch shapes are printed: the defaults in the `fused` modules are set from them. The file is written
after every figure; at the time limit the rest is left out. Exits with 1 when a comparison failed.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_codes import run_coded
from kernel_decode import run_decode, sdpa
from kernel_pages import run_quest
from kernel_prefill import run_prefill
from kernel_rows import run_rows
from kernel_timing import DEVICE, Board

from kvfoundry.bench.record import OutOfTime
from kvfoundry.bench.transfer import copy_rate

RESULTS = Path(__file__).resolve().parent / "results" / "kernel_speed.json"

SECTIONS: dict[str, Callable[[Board], None]] = {
    "sdpa": sdpa,
    "decode": run_decode,
    "coded": run_coded,
    "quest": run_quest,
    "prefill": run_prefill,
    "rows": run_rows,
}


def main() -> None:
    """Run the chosen sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU.")
    torch.manual_seed(0)
    board = Board(arguments.out, arguments.seconds)
    board.content["copy_bytes_per_s"] = copy_rate(torch.device(DEVICE))
    print(f"{board.content['device']}: copies move {board.content['copy_bytes_per_s'] / 1e9:.0f} GB/s", flush=True)
    for name in arguments.only:
        began = time.perf_counter()
        try:
            SECTIONS[name](board)
        except OutOfTime:
            board.note(f"time is up in {name}; run it alone with --only {name}")
            break
        except Exception:
            board.note(f"{name} stopped: {traceback.format_exc(limit=-4)}")
            board.content["gates"][name] = {"error": "stopped", "passed": False}
        torch.cuda.empty_cache()
        board.note(f"{name} took {time.perf_counter() - began:.1f} s")
    board.save()
    wrong = [name for name, gate in board.content["gates"].items() if not gate["passed"]]
    if wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
