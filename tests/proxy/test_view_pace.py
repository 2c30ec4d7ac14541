"""How soon something that ended is tried again."""

import random

import pytest

from narwhal.proxy.pace import attempt_wait_s, backoff_s


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


@pytest.mark.rule("V3")
@pytest.mark.parametrize(
    ("retries", "least", "most"),
    [(0, 0.1, 0.2), (1, 0.2, 0.3), (2, 0.4, 0.5), (3, 0.8, 0.9), (4, 1.0, 1.0), (99, 1.0, 1.0)],
)
def test_attempts_wait_from_the_base_to_the_cap_each_at_random(retries: int, least: float, most: float) -> None:
    drawn = [attempt_wait_s(retries, base_s=0.1, cap_s=1.0) for _ in range(300)]
    assert least <= min(drawn) <= max(drawn) <= most + 1e-9
    if most < 1.0:
        assert max(drawn) - min(drawn) > 0.05
