"""kvfoundry.load: every kind of source, and one clear line for everything that is wrong with one."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvfoundry
from kvfoundry import embedded, wheels
from kvfoundry.errors import KVFoundryError, MissingExtraError, ModelLoadError

WORDS = ["<|end|>", "<|begin|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>' }}{% endfor %}"


def tiny_config(tie: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=tie,
    )


def save_tiny_model(folder: Path, *, dtype: torch.dtype = torch.float32, tie: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(tie)).to(dtype).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[0]).save_pretrained(folder)
    return model


def write_tiny_gguf(path: Path) -> None:
    """The tiny Llama as llama.cpp would store it (its rotary layout permutes the rows of the query and key weights)."""
    config = tiny_config()
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)  # transformers 5.17 does not read a GGUF without it
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            tensor = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            if heads:
                halves = tensor.reshape(heads, 2, -1, tensor.shape[-1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refusal(name: str | Path, **arguments: object) -> str:
    """The message that loading ``name`` is refused with, checked to be one line."""
    with pytest.raises(KVFoundryError) as caught:
        kvfoundry.load(name, **arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_folder_gives_the_saved_model(tmp_path: Path) -> None:
    saved = save_tiny_model(tmp_path)
    model, tokenizer = kvfoundry.load(tmp_path, device="cpu")
    ids = tokenizer("hello", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, saved(ids).logits, rtol=0, atol=1e-6)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model, "_hf_hook")


def test_tokenizer_pads_left_with_a_pad_token(tiny_folder: Path) -> None:
    model, tokenizer = kvfoundry.load(tiny_folder, device="cpu")
    batch = tokenizer(["a", "abc"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert tokenizer.pad_token == WORDS[0]
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_tokenizer_false_leaves_it_out(tiny_folder: Path) -> None:
    assert kvfoundry.load(tiny_folder, device="cpu", tokenizer=False)[1] is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)],
)
def test_dtype_on_the_cpu(tiny_folder: Path, dtype: str | torch.dtype, expected: torch.dtype) -> None:
    model, _ = kvfoundry.load(tiny_folder, device="cpu", dtype=dtype, tokenizer=False)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_auto_on_cuda_keeps_the_checkpoints_dtype(tiny_folder: Path) -> None:
    model, _ = kvfoundry.load(tiny_folder)
    assert (model.device.type, model.dtype) == ("cuda", torch.bfloat16)


def test_attn_implementation_is_honoured(tiny_folder: Path) -> None:
    model, _ = kvfoundry.load(tiny_folder, device="cpu", attn_implementation="eager", tokenizer=False)
    assert model.config._attn_implementation == "eager"


def test_loading_prints_nothing(tiny_folder: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kvfoundry.load(tiny_folder, device="cpu")
    kvfoundry.load(tiny_gguf, device="cpu")
    assert capfd.readouterr() == ("", "")


def test_progress_bars_are_restored(tiny_folder: Path) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    before = (logging.is_progress_bar_enabled(), are_progress_bars_disabled(), logging.get_verbosity())
    kvfoundry.load(tiny_folder, device="cpu")
    assert (logging.is_progress_bar_enabled(), are_progress_bars_disabled(), logging.get_verbosity()) == before


def test_missing_folder() -> None:
    assert "there is no folder './no-such-folder'" in refusal("./no-such-folder")


def test_empty_name() -> None:
    assert "empty" in refusal(" ")


def test_folder_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no weights" in refusal(tmp_path)


def test_folder_with_unreadable_config(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    assert "config.json cannot be read" in refusal(tmp_path)


def test_folder_with_damaged_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "may be damaged" in refusal(tmp_path)


def test_folder_that_lacks_some_weights_is_refused_and_not_filled_with_noise(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tie=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights" in refusal(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    assert "no_such_architecture" in refusal(tmp_path)


def test_folder_without_tokenizer_names_the_way_out(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer=False" in refusal(tmp_path)
    assert kvfoundry.load(tmp_path, device="cpu", tokenizer=False)[1] is None


def test_misspelt_embedded_name_is_told_at_once() -> None:
    assert "did you mean 'smollm2'?" in refusal("smolm2")


def test_unknown_hub_name_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal("nobody/no-such-model")
    assert "cannot load hub model 'nobody/no-such-model'" in message
    assert "check the name, the network" in message


def test_arguments_that_cannot_be_honoured(tiny_folder: Path) -> None:
    assert "unknown device 'gpu'" in refusal(tiny_folder, device="gpu")
    assert "did you mean 'float16'?" in refusal(tiny_folder, dtype="fp16")
    assert "is for hub models" in refusal(tiny_folder, revision="main")
    assert "unknown attn_implementation 'flesh'" in refusal(tiny_folder, attn_implementation="flesh")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_and_flash_attention_without_cuda(tiny_folder: Path) -> None:
    assert "0 CUDA devices" in refusal(tiny_folder, device="cuda")
    with pytest.raises(MissingExtraError, match="flash-attn"):
        kvfoundry.load(tiny_folder, attn_implementation="flash_attention_2")


def test_gguf_file_equals_the_model_it_was_written_from(tiny_gguf: Path, tmp_path: Path) -> None:
    saved = save_tiny_model(tmp_path)
    model, tokenizer = kvfoundry.load(tiny_gguf, device="cpu")
    ids = tokenizer("hello", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, saved(ids).logits, rtol=0, atol=1e-5)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|begin|>", "<|end|>", "<|end|>")
    assert tokenizer.padding_side == "left"


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    assert "not in GGUF format" in refusal(tmp_path / "text.gguf")
    assert "No such file" in refusal(tmp_path / "absent.gguf")
    (tmp_path / "text.txt").write_text("hello")
    assert "not a .gguf file" in refusal(tmp_path / "text.txt")


def test_gguf_cut_short(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    for share in (0.01, 0.5, 0.95):
        (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
        assert "may be cut short" in refusal(tmp_path / "cut.gguf")


# --- embedded models: a real conversion of a tiny GGUF in a wheel on disk ---


@pytest.fixture
def tiny_embedded(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> embedded.EmbeddedModel:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "tiny/model.gguf")
    monkeypatch.setenv("KVFOUNDRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVFOUNDRY_TINY_WHEEL", str(wheel))
    return embedded.EmbeddedModel(
        name="tiny",
        summary="a tiny model",
        requirement="tiny==1",
        member="tiny/model.gguf",
        sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        download_megabytes=1,
    )


def _left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock")


def test_embedded_model_is_converted_once(
    tiny_embedded: embedded.EmbeddedModel, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded.ensure(tiny_embedded)
    assert _left_behind(tmp_path) == [folder.name]
    converted, tokenizer = kvfoundry.load(folder, device="cpu")
    direct, _ = kvfoundry.load(tiny_gguf, device="cpu")
    for (name, stored), original in zip(converted.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(stored, original.bfloat16().float()), name
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi<|end|>"
    assert tokenizer.model_max_length == 128
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|begin|>", "<|end|>", "<|end|>")

    monkeypatch.setattr(embedded, "convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert embedded.ensure(tiny_embedded) == folder


def test_embedded_names_reach_load(tiny_embedded: embedded.EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedded.EMBEDDED, "tiny", tiny_embedded)
    model, tokenizer = kvfoundry.load("tiny", device="cpu")
    assert model.config.num_hidden_layers == 2
    assert tokenizer.padding_side == "left"
    assert kvfoundry.models.embedded_models()["tiny"] == "a tiny model"


def test_wrong_hash_is_refused_and_leaves_nothing(tiny_embedded: embedded.EmbeddedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="not the expected 000000000000"):
        embedded.ensure(replace(tiny_embedded, sha256="0" * 64))
    assert _left_behind(tmp_path) == []


def test_damaged_or_absent_wheel(tiny_embedded: embedded.EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = Path(os.environ["KVFOUNDRY_TINY_WHEEL"])
    with pytest.raises(ModelLoadError, match="not an intact wheel"):
        embedded.ensure(replace(tiny_embedded, member="tiny/other.gguf"))
    wheel.write_bytes(wheel.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match="not an intact wheel"):
        embedded.ensure(tiny_embedded)
    monkeypatch.setenv("KVFOUNDRY_TINY_WHEEL", str(wheel.with_name("absent.whl")))
    with pytest.raises(ModelLoadError, match="KVFOUNDRY_TINY_WHEEL names"):
        embedded.ensure(tiny_embedded)


def test_failed_conversion_leaves_nothing(
    tiny_embedded: embedded.EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_done(_: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert_gguf", half_done)
    with pytest.raises(KeyboardInterrupt):
        embedded.ensure(tiny_embedded)
    assert _left_behind(tmp_path) == []


def test_conversion_error_is_one_line(tiny_embedded: embedded.EmbeddedModel, tmp_path: Path) -> None:
    garbage = b"GGUF" + bytes(100)
    with zipfile.ZipFile(os.environ["KVFOUNDRY_TINY_WHEEL"], "w") as archive:
        archive.writestr("tiny/model.gguf", garbage)
    with pytest.raises(ModelLoadError, match="cannot convert the embedded model 'tiny'") as caught:
        embedded.ensure(replace(tiny_embedded, sha256=hashlib.sha256(garbage).hexdigest()))
    assert "\n" not in str(caught.value)
    assert _left_behind(tmp_path) == []


def test_offline_names_the_remedy(tiny_embedded: embedded.EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOUNDRY_TINY_WHEEL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip without an index answers as if offline, without waiting
    with pytest.raises(ModelLoadError, match=r"cannot fetch tiny==1 with pip.*set KVFOUNDRY_TINY_WHEEL") as caught:
        embedded.ensure(tiny_embedded)
    assert "\n" not in str(caught.value)


def test_cache_folder_that_cannot_be_made(
    tiny_embedded: embedded.EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVFOUNDRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot write the model cache.*KVFOUNDRY_CACHE"):
        embedded.ensure(tiny_embedded)


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KVFOUNDRY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert wheels.cache_folder() == Path("/home/someone/.cache/kvfoundry")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert wheels.cache_folder() == Path("/elsewhere/kvfoundry")
    monkeypatch.setenv("KVFOUNDRY_CACHE", "/here")
    assert wheels.cache_folder() == Path("/here")


def _convert_and_record(model: embedded.EmbeddedModel, log: Path, start: "multiprocessing.synchronize.Barrier") -> None:
    convert = embedded.convert_gguf

    def recorded(gguf_file: Path, folder: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        convert(gguf_file, folder)

    embedded.convert_gguf = recorded
    start.wait(timeout=60)
    AutoModelForCausalLM.from_pretrained(embedded.ensure(model))


def test_two_processes_convert_once(tiny_embedded: embedded.EmbeddedModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, log = context.Barrier(2), tmp_path / "conversions"
    arguments = (tiny_embedded, log, start)
    workers = [context.Process(target=_convert_and_record, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert len(_left_behind(tmp_path)) == 1


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import kvfoundry, kvfoundry.embedded, sys; print(kvfoundry.__version__, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [kvfoundry.__version__, "False"]


@pytest.mark.embedded
def test_smollm2_knows_the_capital_of_france() -> None:
    model, tokenizer = kvfoundry.load("smollm2", device="cpu")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert model.dtype == torch.float32
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
