"""Load without the noise of the libraries below."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO


@contextmanager
def quiet(*, stderr: bool = False) -> Iterator[None]:
    """Hide transformers' loading bars and warnings inside the block; leave the hub's download bars, which help.

    ``stderr=True`` also drops what is printed on standard error: transformers' GGUF reader draws a bar of its own
    that no switch reaches. Restores what was set before.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    # these two also switch the hub's bars, so those are set right after each
    logging.disable_progress_bar()
    (enable_progress_bars if hub_bars else disable_progress_bars)()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(StringIO()) if stderr else nullcontext():
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
        (enable_progress_bars if hub_bars else disable_progress_bars)()
        logging.set_verbosity(verbosity)
