"""The libraries of the extra `rag`, imported when the first retriever needs one."""

import importlib
import importlib.util
from types import ModuleType

from kvfoundry.errors import MissingExtraError

_PACKAGES = {"Stemmer": "PyStemmer", "sentence_transformers": "sentence-transformers"}


def is_installed(module: str) -> bool:
    """Whether a library of the extra is there, without importing it."""
    return importlib.util.find_spec(module) is not None


def load(module: str, what: str) -> ModuleType:
    """Import one library.

    Raises:
        MissingExtraError: it is not installed.
    """
    if not is_installed(module):
        package = _PACKAGES.get(module, module)
        raise MissingExtraError(f"{what} needs the package {package}; install the extra: pip install 'kvfoundry[rag]'")
    return importlib.import_module(module)
