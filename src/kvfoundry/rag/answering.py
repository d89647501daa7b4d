"""All samples of a file answered one after the other: what the command and the pipeline call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvfoundry.errors import DataError, KVFoundryError
from kvfoundry.rag.decode import Decoder
from kvfoundry.rag.kv_file import KvFile
from kvfoundry.rag.prompts import Laid
from kvfoundry.rag.speculative import Speculator
from kvfoundry.rag.trace_file import TraceFile

OnProgress = Callable[[str, int, int], None]


def answer_all(
    decoder: Decoder | Speculator, prompts: Sequence[Laid], trace: TraceFile, *, on_progress: OnProgress | None = None
) -> None:
    """Answer what the trace does not have yet. A sample that fails is named in it and left out; the rest goes on."""
    for done, prompt in enumerate(prompts, start=1):
        if prompt.item not in trace.finished:
            try:
                trace.add(decoder.answer(prompt).record())
            except KVFoundryError as error:
                trace.skipped.append(f"({prompt.item}) {error}")
        if on_progress is not None:
            on_progress("samples", done, len(prompts))


def require_same(made: KvFile, path: Path, prompts: Sequence[Laid], dataset_digest: str) -> None:
    """DataError unless the file was made of these data, with these candidates."""
    if made.dataset["sha256"] != dataset_digest:
        raise DataError(f"{path} was made for {made.dataset['path']}, not for the data that are given; build again.")
    built = {sample.item: [chunk.id for chunk in sample.chunks] for sample in made.samples}
    for prompt in prompts:
        if prompt.item not in built:
            raise DataError(f"{path} lacks sample {prompt.item}; build it with a larger --limit.")
        if built[prompt.item] != [each.id for each in prompt.candidates]:
            raise DataError(f"{path} was made of another retrieval file (sample {prompt.item} differs); build again.")
