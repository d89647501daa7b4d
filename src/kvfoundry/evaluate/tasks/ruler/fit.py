"""How much filler fits: the largest size whose prompt stays within a number of tokens."""

from collections.abc import Callable


def largest_fitting(
    tokens_of: Callable[[int], int], room: int, smallest: int, most: int, guess: int | None = None
) -> int | None:
    """The largest size from `smallest` to `most` with at most `room` tokens; None where `smallest` has more already.

    Sizes are tried near `guess` first: the size of a neighbour usually fits after a handful of counts. Without a guess
    the tokens of two small sizes give one. A larger size is taken to have no fewer tokens; where that fails now and
    then, the answer still fits.
    """
    counted: dict[int, int] = {}

    def fits(size: int) -> bool:
        if size not in counted:
            counted[size] = tokens_of(size)
        return counted[size] <= room

    if not fits(smallest):
        return None
    if guess is None:
        probe = min(most, smallest + 64)
        if fits(probe) and counted[probe] > counted[smallest]:
            per_unit = (counted[probe] - counted[smallest]) / (probe - smallest)
            guess = smallest + int((room - counted[smallest]) / per_unit)
        else:
            guess = probe
    low, high = smallest, most + 1  # low fits; high does not, or is no size
    at, step = min(max(guess, smallest), most), 1
    if fits(at):
        while at < high and fits(at):
            low, at, step = at, at + step, step * 2
        high = min(at, high)
    else:
        while at > low and not fits(at):
            high, at, step = at, at - step, step * 2
        low = max(at, low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
