"""The rival's side of against_kvpress.py: runs where kvpress is installed, in the folder that it is given.

Prints one JSON line for each job, in order.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


def build(job: dict, tokens: int):
    arguments = dict(job["arguments"])
    # Their rows are int(tokens * (1 - ratio)); half a row more keeps the rounding on our side of the number.
    ratio = 1 - (job["rows"] + 0.5) / tokens
    if "press" in arguments:
        inner = getattr(kvpress, arguments.pop("press"))(compression_ratio=ratio, window_size=64, kernel_size=5)
        return getattr(kvpress, job["press"])(inner, **arguments)
    return getattr(kvpress, job["press"])(compression_ratio=ratio, **arguments)


@torch.inference_mode()
def answer(model, press, item: dict, tail: int, device: str) -> tuple[list[int], float]:
    """Greedy tokens after the compressed text and the question, and the rows kept per head."""
    context = torch.tensor([item["ids"][:-tail]], device=device)
    cache = DynamicCache()
    with press(model):
        model(context, past_key_values=cache)
    # Some presses act when their context ends, so the answer is read outside of it.
    rows = sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers)
    position = context.shape[1]
    step = torch.tensor([item["ids"][-tail:]], device=device)
    answer: list[int] = []
    for _ in range(16):
        positions = torch.arange(position, position + step.shape[1], device=device)[None]
        # Positions go on from the text, the mask from what is stored: as kvpress's own pipeline calls its model.
        logits = model(step, past_key_values=cache, position_ids=positions).logits
        position += step.shape[1]
        step = logits[:, -1:].argmax(-1)
        if int(step) in item["stops"]:
            break
        answer.append(int(step))
    return answer, rows


def main() -> None:
    folder = Path(sys.argv[1])
    work = json.loads((folder / "jobs.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(work["device"]).eval()
    stops = model.generation_config.eos_token_id
    for item in work["items"]:
        item["stops"] = stops if isinstance(stops, list) else [stops]
    versions = {"transformers": transformers.__version__, "kvpress": version("kvpress")}
    for job in work["jobs"]:
        tail = job["tail"]
        results = [
            answer(model, build(job, len(item["ids"]) - tail), item, tail, work["device"]) for item in work["items"]
        ]
        found = {"answers": [tokens for tokens, _ in results], "rows": sum(rows for _, rows in results) / len(results)}
        print(json.dumps({**found, **versions}), flush=True)


if __name__ == "__main__":
    main()
