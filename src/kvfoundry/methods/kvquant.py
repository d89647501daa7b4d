"""KVQuant: keys before RoPE per channel, values per token, levels where the numbers are, outliers exactly."""

from kvfoundry.checks import choice, flag, number, whole
from kvfoundry.codecs import KVCodec
from kvfoundry.codecs.calibrated import Calibration
from kvfoundry.codecs.kvquant import KVQuantKeys, KVQuantValues
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization, arXiv 2401.18079",
    axes={"codec": "2 to 4 bits at fitted levels; keys before RoPE per channel, values per token; sparse outliers"},
    evicts=False,
)
def kvquant(
    bits: int = 3,
    outliers: float = 0.01,
    first: int = 1,
    levels: str = "fitted",
    q_norm: bool = False,
    calibration: str = "",
) -> Piece:
    """Store keys and values as codes of 2, 3 or 4 bits at levels that follow how the numbers lie.

    Keys are turned back to before RoPE, where a channel keeps its range, and normalized per channel by thresholds that
    are frozen; values are normalized per token. Levels come from k-means, one table per layer for keys and one for
    values. The share `outliers` of the numbers is kept exactly, with its place; the `first` tokens of a sequence are
    kept whole.

    calibration: a file of `kvfoundry calibrate`, made on this very model. Without one, thresholds and levels are
    settled on the prompt, on the rows that are stored of it; a single token decides little, so let there be a prompt.
    levels: "fitted", or "uniform" steps, or "grid", uniform steps with one at zero: the paper's integer variants.
    q_norm: what is restored gets the mean and deviation of what was stored (for 2 bits).
    """
    if bits not in (2, 3, 4) or isinstance(bits, bool):
        raise SpecError(f"kvquant: bits must be 2, 3 or 4, got {bits!r}.")
    number("outliers", outliers, least=0, most=0.5)
    whole("first", first)
    choice("levels", levels, ("fitted", "uniform", "grid"))
    flag("q_norm", q_norm)
    if not isinstance(calibration, str):
        raise SpecError(f"calibration must be the path of a file of `kvfoundry calibrate`, got {calibration!r}.")
    tables = Calibration.read(calibration) if calibration else None
    if tables is not None:
        if levels != "fitted":
            raise SpecError("kvquant: a calibration brings its own levels; leave levels='fitted'.")
        for name, asked, has in (("outliers", float(outliers), tables.outliers), ("q_norm", q_norm, tables.q_norm)):
            if asked != has:
                raise SpecError(f"kvquant: the calibration {calibration!r} is for {name}={has}, not {name}={asked}.")
    shared = (bits, float(outliers), levels, q_norm, first, tables)
    return Piece(codec=KVCodec(KVQuantKeys(*shared), KVQuantValues(*shared)))  # type: ignore[arg-type]
