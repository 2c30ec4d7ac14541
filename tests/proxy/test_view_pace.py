"""How soon a stream that ended is tried again."""

import random

from narwhal.proxy.pace import backoff_s


def test_the_first_retry_comes_at_once_and_the_wait_grows_to_its_cap() -> None:
    rng = random.Random(5)
    assert backoff_s(0, rng) == backoff_s(1, rng) == 0.0
    for failures, low, high in [
        (2, 0.05, 0.1),
        (3, 0.1, 0.2),
        (4, 0.2, 0.4),
        (6, 0.8, 1.6),
        (7, 1.0, 2.0),
        (5000, 1.0, 2.0),
    ]:
        drawn = [backoff_s(failures, rng) for _ in range(200)]
        assert low <= min(drawn) < max(drawn) <= high


def test_workers_do_not_come_back_as_one() -> None:
    assert len({backoff_s(8, random.Random(seed)) for seed in range(50)}) == 50
