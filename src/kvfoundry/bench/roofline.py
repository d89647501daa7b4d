"""What a step or a prompt cannot do without, and the time that the device's own rates leave for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvfoundry.bench.timing import spread
from kvfoundry.planning.geometry import LayerGeometry


@dataclass(frozen=True)
class Roofline:
    """Measured rates of a device, None where they are not asked for.

    flops_per_s: of products of matrices in the model's dtype; link_bytes_per_s: from pinned host memory.
    """

    bytes_per_s: float
    flops_per_s: float | None = None
    link_bytes_per_s: float | None = None

    def seconds(self, nbytes: int, flops: int = 0, linked: int = 0) -> float:
        """The least time for so many bytes, operations, and bytes from the host: the longest of them."""
        work = ((nbytes, self.bytes_per_s), (flops, self.flops_per_s), (linked, self.link_bytes_per_s))
        return max(amount / rate for amount, rate in work if rate is not None)

    def bound(self, nbytes: int, flops: int = 0) -> str:
        """Which of the two it is: "memory" or "compute"."""
        return "memory" if self.seconds(nbytes, flops) == nbytes / self.bytes_per_s else "compute"

    def beside(self, times: Sequence[float], nbytes: int, linked: int = 0) -> dict[str, Any]:
        """The spread of measured times (seconds) of steps with the roofline beside it."""
        found, least = spread(times), self.seconds(nbytes, linked=linked) * 1e3
        return {**found, "roofline_ms": least, "times_roofline": found["ms"] / least}


def weight_bytes(model: PreTrainedModel, batch: int = 1) -> int:
    """Bytes of the weights that every step reads.

    All but an embedding that is not the output's too, of which a step reads one row per sequence; of experts, as many
    as the sequences of a batch need at most.
    """
    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = min(1.0, batch * chosen / experts) if experts and chosen else 1.0
    read = sum(
        int(weight.nbytes * share) if ".experts." in name else weight.nbytes
        for name, weight in model.named_parameters()
    )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return read if head is not None and head.weight is embedding.weight else read - embedding.weight.nbytes


def row_bytes(layers: dict[int, LayerGeometry], rows: int, itemsize: int) -> int:
    """Bytes of the keys and values of a text of `rows` tokens in the full cache; a window layer holds its window."""
    kept = (
        layer.numbers() * (rows if layer.rule.span is None else min(rows, layer.rule.span)) for layer in layers.values()
    )
    return sum(kept) * itemsize


def prompt_flops(model: PreTrainedModel, layers: dict[int, LayerGeometry], tokens: int, batch: int) -> int:
    """Operations of reading a prompt, at least: products with the weights of linear layers, and dense causal attention.

    Experts that are not linear layers do not count, and the head speaks once.
    """
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    products = 2 * sum(module.weight.numel() for module in linear) * tokens
    if isinstance(head, nn.Linear):
        products += 2 * head.weight.numel()
    for layer in layers.values():
        seen = tokens if layer.rule.span is None else min(tokens, layer.rule.span)
        pairs = tokens * seen - seen * (seen - 1) // 2
        products += 2 * layer.query_heads * (layer.key_dim + layer.value_dim) * pairs
    return products * batch
