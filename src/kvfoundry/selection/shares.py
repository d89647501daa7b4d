"""Whole rows out of fractional wishes: every total is met exactly."""


def shared_out(wishes: list[float], least: list[int], most: list[int], total: int) -> list[int]:
    """Whole numbers close to the wishes that sum to `total`, each between its bounds.

    Every wish is rounded down; what is missing goes first to those that are furthest below their wish, what exceeds
    (because of `least`) is taken first from those furthest above. Where the bounds leave no way, the sum stays as
    close to the total as they allow.
    """
    shares = [min(max(int(wish), low), high) for wish, low, high in zip(wishes, least, most, strict=True)]
    while missing := total - sum(shares):
        step = 1 if missing > 0 else -1
        limits = most if missing > 0 else least
        movable = [i for i, share in enumerate(shares) if (limits[i] - share) * step > 0]
        if not movable:
            break
        movable.sort(key=lambda i: (shares[i] - wishes[i]) * step)
        left, each = abs(missing), max(1, abs(missing) // len(movable))
        for i in movable:
            moved = min(each, abs(limits[i] - shares[i]), left)
            shares[i] += moved * step
            left -= moved
    return shares
