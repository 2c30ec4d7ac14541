"""How soon something that ended is tried again: streams to control, workers that died."""

from random import Random

RETRY_BASE_S = 0.1
RETRY_CAP_S = 2.0


def backoff_s(failures: int, rng: Random) -> float:
    """Seconds before the next try after `failures` in a row.

    The first comes at once, then the wait doubles up to the cap, each at random in the upper half of its step so that
    workers do not come back as one.
    """
    if failures <= 1:
        return 0.0
    step = min(RETRY_CAP_S, RETRY_BASE_S * 2.0 ** min(failures - 2, 16))
    return step * (0.5 + rng.random() / 2)
