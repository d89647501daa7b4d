"""Tensors and a tiny model for the tests of single methods."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvfoundry.method import Method
from kvfoundry.selection.scores.given import GivenScores


def rows(
    batch: int, query_heads: int, heads: int, tokens: int, dim: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [batch, query_heads, tokens, dim], key and value [batch, heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, count, tokens, dim) for count in (query_heads, heads, heads)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def kept_under(spec: str, scores: Tensor, layer_idx: int = 0, num_layers: int = 1) -> list[list[list[int]]]:
    """Positions that every batch row and head keeps when the method's score is `scores` [batch, heads, tokens]."""
    method = Method.parse(spec).replace(score=GivenScores((scores,) * num_layers))
    batch, heads, tokens = scores.shape
    layer = method.compress(*rows(batch, heads, heads, tokens), layer_idx=layer_idx, num_layers=num_layers)
    return [[[p for p in head.tolist() if p >= 0] for head in row] for row in layer.positions]


def tiny_llama(layers: int = 3, query_heads: int = 4, heads: int = 2, head_dim: int = 16) -> LlamaForCausalLM:
    """A seeded random model in float32 with attention peaked enough for a wrong row to show."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=query_heads * head_dim, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=query_heads, num_key_value_heads=heads, head_dim=head_dim, vocab_size=97,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.15,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class LargestTensor(TorchDispatchMode):
    """The largest tensor that an operation returns in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storages = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in storages:
                self.numel = max(self.numel, tensor.numel())
        return result
