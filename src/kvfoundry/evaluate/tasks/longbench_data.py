"""The samples of LongBench: from a folder of the published files, or from the hub."""

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError
from kvfoundry.evaluate.scores.longbench import score
from kvfoundry.evaluate.tasks.longbench_sets import DataSet
from kvfoundry.evaluate.tasks.records import Records, read_records, records_of_lines, text_fault

_REPOSITORY, _ARCHIVE = "THUDM/LongBench", "data.zip"

Fault = Callable[[dict[str, Any]], str | None]

# (stem of a file, what is wrong with a record, skip damaged ones) -> its records
Source = Callable[[str, Fault, bool], Records]


@dataclass(frozen=True)
class LongSample:
    """One sample.

    Attributes:
        item: the sample's `_id`, or its number where it has none or not for itself.
        given: the field `input`, what is asked about the context.
        length: as the data set counts it, see `DataSet.length_of`; measured where the file does not say.
    """

    item: str
    context: str
    given: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]
    length: int


@dataclass(frozen=True)
class LongData:
    """The samples of one data set; digest: SHA-256 of what they say; damaged: why others of the file were left out."""

    path: Path
    samples: tuple[LongSample, ...]
    digest: str
    damaged: tuple[str, ...] = ()


def folder_source(folder: Path) -> Source:
    """Files NAME.jsonl or NAME.jsonl.gz of a folder.

    Raises:
        DataError: no such folder; from the source, no such file.
    """
    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist; give the folder that holds the LongBench .jsonl files.")

    def read(stem: str, fault: Fault, skip_damaged: bool) -> Records:
        for path in (folder / f"{stem}.jsonl", folder / f"{stem}.jsonl.gz"):
            if path.is_file():
                return read_records(path, fault, skip_damaged)
        raise DataError(f"data folder {folder} has no {stem}.jsonl or {stem}.jsonl.gz; add it, or choose --datasets.")

    return read


def hub_source() -> Source:
    """The published archive, fetched once into the hub's cache.

    Raises:
        DataError: the hub cannot be reached, or the archive is not what it was; from the source, no such file.
    """
    from kvfoundry.embedded import first_line

    try:
        path = _fetched()
        archive = zipfile.ZipFile(path)
    except Exception as error:  # the errors of the hub's client have no common base
        raise DataError(
            f"LongBench cannot be fetched from the hub ({_REPOSITORY}: {first_line(error)}); "
            "give a folder with its .jsonl files as --data-dir."
        ) from error

    def read(stem: str, fault: Fault, skip_damaged: bool) -> Records:
        for name in archive.namelist():
            if name.rpartition("/")[2] == f"{stem}.jsonl":
                return records_of_lines(path / name, archive.read(name).decode("utf-8"), fault, skip_damaged)
        raise DataError(f"{stem}.jsonl is not in the archive {path} of the hub; give a folder as --data-dir.")

    return read


def _fetched() -> Path:
    """The archive in the hub's cache, put there first where it is missing."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(_REPOSITORY, _ARCHIVE, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        # Fails at once where there is no way to the hub; the download itself would go on trying for half a minute.
        get_hf_file_metadata(hf_hub_url(_REPOSITORY, _ARCHIVE, repo_type="dataset"), timeout=10)
        return Path(hf_hub_download(_REPOSITORY, _ARCHIVE, repo_type="dataset"))


def load_data(data_set: DataSet, source: Source, *, e: bool = False, skip_damaged: bool = False) -> LongData:
    """Every sample of one data set, or of its LongBench-E form.

    Raises:
        DataError: no file, no usable sample, or damaged ones that are not to be skipped.
    """
    records = source(
        f"{data_set.name}_e" if e else data_set.name, lambda record: _fault(data_set, record), skip_damaged
    )
    ids = Counter(record.get("_id") for record in records.rows)
    samples = []
    for number, record in enumerate(records.rows, start=1):
        own = record.get("_id")
        item = own if isinstance(own, str) and own and ids[own] == 1 else str(number)
        samples.append(_sample(data_set, item, record))
    digest = hashlib.sha256(json.dumps(records.rows, sort_keys=True).encode()).hexdigest()
    return LongData(records.path, tuple(samples), digest, records.damaged)


def _answers(record: dict[str, Any]) -> tuple[Any, Any]:
    """Answers and class names; MiniLongBench keeps both together in the first answer."""
    answers = record.get("answers")
    if isinstance(answers, list) and answers and isinstance(answers[0], dict):
        record = answers[0]
    return record.get("answers"), record.get("all_classes")


def _fault(data_set: DataSet, record: dict[str, Any]) -> str | None:
    problem = text_fault("context")(record)
    if problem:
        return problem
    if not record["context"].strip():
        return "has an empty context"
    given = record.get("input") or ""
    if not isinstance(given, str):
        return "has no text in field 'input'"
    # In repobench-p the context may hold all of the code.
    if data_set.takes_input and data_set.language != "code" and not given.strip():
        return "has nothing in field 'input'"
    answers, classes = _answers(record)
    if not _are_texts(answers):
        return "has no list of texts in field 'answers'"
    if data_set.metric == "classification" and not _are_texts(classes):
        return "has no list of texts in field 'all_classes'"
    if data_set.metric.startswith("retrieval"):
        try:
            score(data_set.metric, "", answers)
        except ValueError as error:
            return f"cannot be scored: {error}"
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, str) for part in value)


def _sample(data_set: DataSet, item: str, record: dict[str, Any]) -> LongSample:
    answers, classes = _answers(record)
    context, given, length = record["context"], record.get("input") or "", record.get("length")
    if not isinstance(length, int):
        length = data_set.length_of(context, given, *answers)
    return LongSample(item, context, given, tuple(answers), tuple(classes or ()), length)
