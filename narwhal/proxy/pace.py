"""How soon something that ended is tried again: streams to control, workers that died, a request's attempts."""

from random import Random

from tenacity import RetryCallState, Retrying
from tenacity.wait import wait_exponential_jitter

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


def attempt_wait_s(retries: int, *, base_s: float, cap_s: float) -> float:
    """Seconds before another attempt of a request that had so many retries (spec V3): `base_s`, doubled with each, and
    up to as much again as the first at random, so that requests that fail together do not come back as one; `cap_s` at
    most."""
    state = RetryCallState(Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = retries + 1
    return wait_exponential_jitter(multiplier=base_s, max=cap_s, jitter=base_s)(state)
