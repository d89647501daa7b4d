"""One file per published method. Calling the module lists them: `kvfoundry.methods()`.

A new method is a new file here with one registered function; nothing else has to change.
"""

import sys
from types import ModuleType

from kvfoundry.registry import MethodInfo, entries


class _CallableModule(ModuleType):
    """`kvfoundry.methods` is this package and, by its public contract, also the function that lists it."""

    def __call__(self) -> dict[str, MethodInfo]:
        """Name -> description (axes, parameters with defaults, paper) of every method and piece."""
        return entries()


sys.modules[__name__].__class__ = _CallableModule
