"""The libraries of the extra `eval`, imported when the first score needs one."""

import importlib
import importlib.util
import logging
from types import ModuleType

from kvfoundry.errors import MissingExtraError


def is_installed(module: str) -> bool:
    """Whether a library of the extra is there, without importing it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def require(module: str, what: str) -> None:
    """Refuse early what a missing library would stop later.

    Raises:
        MissingExtraError: it is not installed.
    """
    if not is_installed(module):
        package = module.partition(".")[0].replace("_", "-")
        raise MissingExtraError(f"{what} needs the package {package}; install the extra: pip install 'kvfoundry[eval]'")


def load(module: str) -> ModuleType:
    """Import one library.

    Raises:
        MissingExtraError: it is not installed.
    """
    require(module, "this score")
    found = importlib.import_module(module)
    if module == "jieba":
        found.setLogLevel(logging.WARNING)  # it reports the loading of its dictionary on stderr
    return found
