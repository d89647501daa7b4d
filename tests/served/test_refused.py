"""What the connector does not serve, on a server: one line in vLLM's log, and every request computed in full.

Needs an environment with vLLM: `make test-vllm`.
"""

from __future__ import annotations

import pytest
import torch

from .prompts import QUESTIONS, prompt
from .servers import needs_vllm

pytestmark = needs_vllm
ASKED = prompt(QUESTIONS[0], sentences=24)


@pytest.fixture(scope="module")
def hybrid(folder, model):
    """A small model with random weights whose layers are sliding windows and full attention, in turn."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    made = folder / "hybrid"
    Gemma3ForCausalLM(config).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def test_a_hybrid_model_and_the_way_out(start, folder, hybrid):
    """Refused by name; with the remedy that the line names, served, and answers are the same."""
    settings, short = {"store": f"disk:{folder / 'hybrid-disk'}:1GiB"}, ("--max-model-len", "2048")
    refused = start("hybrid", settings, *short, other=hybrid)
    answers = [refused.ask(ASKED) for _ in range(2)]
    assert [answer.cached for answer in answers] == [0, 0] and answers[0].text == answers[1].text
    assert len(refused.lines()) == 1
    assert "serving without the store" in refused.lines()[0] and "disable-hybrid-kv-cache-manager" in refused.lines()[0]
    refused.stop()
    served = start("windows", settings, *short, "--disable-hybrid-kv-cache-manager", other=hybrid)
    first, second = served.ask(ASKED), served.ask(ASKED)
    assert first.text == second.text == answers[0].text
    assert (first.cached, second.cached) == (0, (first.prompt_tokens - 1) // 256 * 256)
    served.stop()


def test_no_store_no_harm(start, folder):
    """A folder that cannot be made, and a Redis that is not there: what can be served is served."""
    (folder / "file").write_text("")
    server = start("no-store", {"store": f"disk:{folder / 'file'}:1GiB"})
    answers = [server.ask(ASKED) for _ in range(2)]
    assert [answer.cached for answer in answers] == [0, 0] and answers[0].text == answers[1].text
    assert len(server.lines()) == 1 and "serving without the store" in server.lines()[0]
    server.stop()
    away = start("away", {"store": "redis://127.0.0.1:9/0?timeout=0.5"})
    again = [away.ask(ASKED) for _ in range(2)]
    assert [answer.text for answer in again] == [answer.text for answer in answers]
    assert len(away.lines()) == 1 and "a tier is away" in away.lines()[0]
    assert max(answer.first for answer in again) < min(answer.first for answer in answers) * 2 + 3
    away.stop()
