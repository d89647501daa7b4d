"""A prompt of a million tokens in pieces, under a method that keeps a budget of them: seconds, peak, stored bytes.

    python benchmarks/million.py [--tokens 1000000] [--chunk 16384] [--budget 16384] [--limit 280]

The shape is that of Llama-3.1-8B in bfloat16 with random weights, and the tokens are random; what they are does not
change the time. Rows of a layer are dropped as soon as a piece has been read there, so the device never holds more than
the budget, and one piece in one layer. Behind the prompt a few tokens are decoded. Where the limit comes first, the
figure says how far the prompt was read. `--device cpu --config tiny --tokens 20000` runs it on a toy.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from decode import Bench, Board, setting
from headinfer import said

from kvfoundry import KVCache, attach
from kvfoundry.bench.random_weights import built
from kvfoundry.feeding import feed

RESULTS = Path(__file__).resolve().parent / "results" / "million.json"
STEPS = 16


@torch.inference_mode()
def main() -> None:
    """Read the prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=280.0, help="seconds after which no further piece is read")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", choices=["llama-3.1-8b", "tiny"], default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, help="tokens of a piece: 16384, and 256 of the toy")
    parser.add_argument("--budget", type=int, help="rows that stay per head and layer: 16384, and 256 of the toy")
    parser.add_argument("--method", default="snapkv(budget={budget}, window=64)", help="spec with {budget} in it")
    arguments = parser.parse_args()
    device, chosen = torch.device(arguments.device), setting(arguments.config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here; --device cpu --config tiny --tokens 20000 runs the benchmark on a toy.")
    usual = 256 if arguments.config == "tiny" else 16384
    chunk, budget = arguments.chunk or usual, arguments.budget or usual
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    board = Board(arguments.out, arguments.limit, device=name, transformers=transformers.__version__)
    model = built(chosen.config, chosen.dtype, device)
    attach(model)
    bench = Bench(board, model, chosen, device)
    weights = sum(weight.nbytes for weight in model.parameters())
    cuda = device.type == "cuda"
    ids = torch.randint(3, chosen.config.vocab_size, (1, arguments.tokens))
    cache = KVCache(model, arguments.method.format(budget=budget))
    cache.expect_prompt(arguments.tokens)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    board.note(f"{cache.method}: {arguments.tokens} tokens in pieces of {chunk}")
    began, pieces, most = time.perf_counter(), [], 0.0
    for stop in [*range(chunk, arguments.tokens, chunk), arguments.tokens]:
        started = time.perf_counter()
        feed(model, ids, None, cache, chunk, stop)
        if cuda:
            torch.cuda.synchronize()
        pieces.append(time.perf_counter() - started)
        most = max(most, cache.kept_rows)
        if len(pieces) % 8 == 1:
            print(
                f"{stop:8d} tokens  {time.perf_counter() - began:7.1f} s  {pieces[-1]:6.2f} s for the last", flush=True
            )
        if time.perf_counter() > board.deadline:
            board.note(f"time is up behind {stop} of {arguments.tokens} tokens")
            break
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - weights if cuda else None
    # budget in all layers, and one piece in one of them
    config = chosen.config
    bound = bench.row_bytes(budget) + bench.row_bytes(chunk) // config.num_hidden_layers
    remembered = cache.method.score.window if cache.method.score is not None else 0
    query_bytes = config.num_attention_heads * config.head_dim * chosen.dtype.itemsize
    bound += config.num_hidden_layers * remembered * query_bytes
    # a tenth: positions, and spare slots of the layer that grows
    board.gate("rows of the cache at its largest, over what budget and piece allow", cache.peak_nbytes / bound, 1.1)
    board.gate("rows per head behind a piece, over the budget", most / budget, 1.0)
    token, times = ids[:, -1:].to(device), []
    for _ in range(STEPS):
        started = time.perf_counter()
        token = said(bench, cache, token).argmax(dim=-1, keepdim=True)
        token.item()
        times.append(time.perf_counter() - started)
    done = cache.seen_tokens - STEPS
    board.content["figures"].append({
        "method": str(cache.method), "tokens": arguments.tokens, "read": done, "chunk": chunk, "budget": budget,
        "seconds": seconds, "tokens_per_s": done / seconds, "seconds_of_pieces": pieces,
        "stored_bytes": cache.nbytes, "peak_cache_bytes": cache.peak_nbytes, "bound_bytes": bound,
        "full_cache_bytes": bench.row_bytes(done), "peak_bytes_over_weights": peak, "weight_bytes": weights,
        "decode_ms": statistics.median(times) * 1e3,
    })  # fmt: skip
    over = "" if peak is None else f"  peak {peak / 1e9:.2f} GB over the weights"
    board.note(
        f"{done} tokens in {seconds:.1f} s = {done / seconds:.0f} tokens/s; stored {cache.nbytes / 1e9:.3f} GB, "
        f"at most {cache.peak_nbytes / 1e9:.3f} GB of rows (full: {bench.row_bytes(done) / 1e9:.1f} GB){over}; "
        f"decode {statistics.median(times) * 1e3:.1f} ms"
    )
    if board.wrong:
        raise SystemExit(f"not right: {', '.join(board.wrong)}")


if __name__ == "__main__":
    main()
