"""What status, engines, proxies and placement print, in every format; goldens are typed by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from narwhal.cli.render import age, clean, latency, some
from tests.cli import fleets
from tests.cli.conftest import Run
from tests.cli.fake_control import FakeControl

GOLDEN = Path(__file__).parent / "golden"

PLACEMENT_JSON = {
    "epoch": 3,
    "version": 17,
    "closed": "",
    "engines": [
        {
            "id": "prefill-0",
            "url": "http://prefill-0:9000",
            "role": "prefill",
            "phases": ["prefill"],
            "incarnation": 1,
            "weight": 1.0,
            "pinned": False,
            "holds": [],
            "quarantine_remaining_s": None,
            "phases_after_quarantine": [],
            "max_inflight": 0,
            "max_inflight_tokens": 0,
        },
        {
            "id": "decode-0",
            "url": "http://decode-0:9000",
            "role": "decode",
            "phases": ["decode"],
            "incarnation": 1,
            "weight": 0.1,
            "pinned": False,
            "holds": ["quarantine"],
            "quarantine_remaining_s": 12.5,
            "phases_after_quarantine": ["prefill", "decode"],
            "max_inflight": 64,
            "max_inflight_tokens": 0,
        },
    ],
}


def golden(name: str) -> str:
    """What a command prints in a pipe."""
    return (GOLDEN / f"{name}.txt").read_text()


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()
    control.proxies = fleets.proxies()


def test_status_is_readable_in_a_pipe(run: Run, control: FakeControl) -> None:
    ran = run("status")
    assert ran.out == golden("status").replace("ADDRESS", control.address)
    assert (ran.code, ran.err) == (0, "")


def test_status_json_has_every_fact_under_its_documented_key(run: Run, control: FakeControl) -> None:
    facts = run("status", "-o", "json").json
    engines, proxies = facts.pop("engines"), facts.pop("proxies")
    assert facts == {
        "fleet": "demo",
        "model": "tiny",
        "ready": True,
        "reason": "",
        "control": {"address": control.address, "ready": True, "epoch": 3, "holder": "c1", "version": 17},
        "monitor": {
            "passes": 86412,
            "failure_streak": 2,
            "degraded": False,
            "errors": [
                {
                    "stage": "health",
                    "error_class": "TimeoutError",
                    "count": 2,
                    "message": "stage took 10 s",
                    "age_s": 1.5,
                },
                {"stage": "handoff", "error_class": "StoreError", "count": 1, "message": "disk full", "age_s": 7300.0},
            ],
        },
        "totals": {"served": 1200, "failed": 3, "rejected": 2, "cancelled": 7, "retried": 4},
        "standbys": [],
    }
    assert engines[1] == {
        "id": "decode-0",
        "url": "http://127.0.0.1:9001",
        "role": "decode",
        "pinned": False,
        "incarnation": 4,
        "phases": [],
        "weight": 1.0,
        "inflight": 0,
        "holds": [
            {
                "kind": "ejected",
                "reason": "connection refused",
                "age_s": 130.7,
                "remaining_s": None,
                "effective": True,
            }
        ],
        "streaks": {"connection": 3, "timeout": 1},
        "checks": [
            {
                "check": "health",
                "verdict": "fail",
                "detail": "connection refused",
                "age_s": 4.2,
                "latency_s": 0.0031,
            }
        ],
        "outcomes": {"refused": 3, "stream_complete": 800},
        "evidence": [
            {
                "failure_class": "connection",
                "streak": 3,
                "limit": 4,
                "total": 5,
                "last": {
                    "words": "decode leg: refused (connecting), on edge/1, handoff of prefill-0, request r-17",
                    "outcome": "refused",
                    "status": 0,
                    "detail": "connecting",
                    "phase": "decode",
                    "proxy": "edge/1",
                    "producer": "prefill-0",
                    "request_id": "r-17",
                    "age_s": 131.0,
                },
            },
            {"failure_class": "timeout", "streak": 1, "limit": 4, "total": 0, "last": None},
            {
                "failure_class": "overload",
                "streak": 0,
                "limit": 4,
                "total": 2,
                "last": {
                    "words": "HTTP 429 (GET /health answered 429)",
                    "outcome": "http_429",
                    "status": 429,
                    "detail": "GET /health answered 429",
                    "phase": "",
                    "proxy": "",
                    "producer": "",
                    "request_id": "",
                    "age_s": 400.0,
                },
            },
        ],
        "producers": ["prefill-0"],
        "misses": 1,
        "suspicion": "",
        "gate_in_s": 7.9,
        "health": [
            {
                "detail": "GET /health: no answer within 5 s",
                "outcome": "read_timeout",
                "latency_s": 5.0,
                "age_s": 140.0,
            },
            {"detail": "GET /health answered 200", "outcome": "", "latency_s": 0.0021, "age_s": 150.0},
        ],
        "drain": None,
        "process": None,
    }
    assert engines[0]["gate_in_s"] is None
    assert engines[2]["suspicion"] == "inference probe again in 4.0 s"
    assert proxies[1] == {
        "id": "edge",
        "slot": 1,
        "boot": 1_790_000_000_000_001,
        "address": "10.0.0.5:8000",
        "pid": 4712,
        "connected": True,
        "acked_epoch": 3,
        "acked_version": 15,
        "lag": 2,
        "refused_epoch": 3,
        "refused_version": 16,
        "refused_reason": "engine decode-1 is listed twice",
        "silent_s": 0.9,
        "resident": {},
        "unread": {},
        "suspect": "its legs fail on 2 of 3 engines that serve other proxies",
    }


@pytest.mark.parametrize("command", ["status", "engines", "proxies", "placement"])
def test_yaml_says_what_json_says(run: Run, control: FakeControl, command: str) -> None:
    control.publish(snapshot=fleets.snapshot())
    assert yaml.safe_load(run(command, "-o", "yaml").out) == run(command, "-o", "json").json


def _scalars(facts: Any) -> Iterator[str]:
    """The facts of a document that a table shows as they are: words, and whole numbers that are not zero."""
    if isinstance(facts, dict):
        for value in facts.values():
            yield from _scalars(value)
    elif isinstance(facts, list):
        for value in facts:
            yield from _scalars(value)
    elif isinstance(facts, str) or (isinstance(facts, int) and not isinstance(facts, bool)):
        yield str(facts or "")


@pytest.mark.parametrize("command", ["status", "engines", "proxies", "placement"])
def test_wide_leaves_no_fact_of_json_out(run: Run, control: FakeControl, command: str) -> None:
    control.publish(snapshot=fleets.snapshot())
    control.status.monitor.failure_streak = 0  # passes are shown of a monitor that works
    wide = run(command, "-o", "wide").out
    left_out = [text for text in _scalars(run(command, "-o", "json").json) if text not in wide]
    # The fleet's name heads the status; the other commands are about one fleet anyway.
    assert set(left_out) <= {"demo"}


def test_engines_wide(run: Run) -> None:
    assert run("engines", "-o", "wide").out == golden("engines-wide")


def test_engines_json_is_the_engines_of_status(run: Run) -> None:
    assert run("engines", "-o", "json").json == {
        "fleet": "demo",
        "engines": run("status", "-o", "json").json["engines"],
    }


@pytest.mark.rule("P6")
def test_proxies_show_who_lags_and_who_refused(run: Run) -> None:
    assert run("proxies").out == golden("proxies")


def test_proxies_json(run: Run) -> None:
    facts = run("proxies", "-o", "json").json
    assert facts["proxies"] == run("status", "-o", "json").json["proxies"]
    assert {key: facts[key] for key in ("fleet", "epoch", "version")} == {"fleet": "demo", "epoch": 3, "version": 17}


def test_placement(run: Run, control: FakeControl) -> None:
    control.publish(heartbeat={"epoch": 3, "version": 17})
    control.publish(snapshot=fleets.snapshot())
    assert run("placement").out == golden("placement")
    assert run("placement", "-o", "json").json == PLACEMENT_JSON
    wide = run("placement", "-o", "wide").out.splitlines()[-1]
    assert " ".join(wide.split()) == (
        "decode-0 decode decode 0.1 quarantine http://decode-0:9000 no 1 12s left prefill+decode 64 -"
    )


def test_closed_admission_heads_the_placement(run: Run, control: FakeControl) -> None:
    snapshot = fleets.snapshot()
    snapshot.closed = "maintenance"
    control.publish(snapshot=snapshot)
    assert run("placement").out.startswith("placement 3.17: admission is closed: maintenance\n")


@pytest.mark.parametrize(
    ("reason", "first"),
    [
        ("no eligible engines", "NOT READY  demo: no eligible engines for decode"),
        ("maintenance", "NOT READY  demo: maintenance"),
        ("monitoring degraded: health TimeoutError", "NOT READY  demo: monitoring degraded: health TimeoutError"),
    ],
)
@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
def test_a_fleet_that_is_not_ready_exits_1(
    run: Run, control: FakeControl, reason: str, first: str, output: str
) -> None:
    control.status = fleets.dead()
    control.status.reason = reason
    ran = run("status", "-o", output)
    assert (ran.code, ran.err) == (1, "")
    if output in ("table", "wide"):
        assert ran.out.splitlines()[0] == first
    else:
        assert reason in ran.out


def test_a_degraded_monitor_is_named(run: Run, control: FakeControl) -> None:
    control.status = fleets.dead()
    control.status.monitor.degraded = True
    control.status.monitor.failure_streak = 5
    control.status.control_ready = False
    out = run("status").out
    assert "monitor   DEGRADED: admission is closed, 5 passes failed in a row\n" in out
    assert "active but not control-ready" in out


def test_a_fleet_in_good_order(run: Run, control: FakeControl) -> None:
    del control.status.engines[1]
    del control.proxies[1:]
    control.status.monitor.failure_streak = 0
    out = run("status").out
    assert out.startswith("READY  demo: 2 of 2 engines serve\n")
    assert "proxies   1 proxy connected, current at placement 3.17\n" in out
    assert "monitor   healthy, 86412 passes, 3 earlier stage errors\n" in out


def test_no_proxy_is_worth_a_warning(run: Run, control: FakeControl) -> None:
    control.proxies.clear()
    assert run("proxies").out == "0 proxies connected: nobody carries traffic\n"


def test_words_that_this_client_does_not_know_are_shown(run: Run, control: FakeControl) -> None:
    control.status.engines[1].holds[0].kind = "embargo"
    assert "embargo 2m10s: connection refused" in run("engines").out


def test_an_engines_words_cannot_steer_the_terminal(run: Run, control: FakeControl) -> None:
    control.status.engines[1].holds[0].reason = "\x1b[2Jall is well\r\n[bold]really[/bold]"
    assert r"ejected 2m10s: \x1b[2Jall is well  [bold]really[/bold]" in run("engines").out


def test_long_words_are_not_cut_in_a_pipe(run: Run, control: FakeControl) -> None:
    control.status.engines[1].holds[0].reason = "x" * 1000
    assert "x" * 1000 in run("engines").out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.99, "0s"), (-3, "0s"), (59.9, "59s"), (60, "1m00s"), (130, "2m10s"), (3599, "59m59s"),
        (3600, "1h00m"), (11100, "3h05m"), (86399, "23h59m"), (86400, "1d0h"), (187200, "2d4h"),
    ],
)  # fmt: skip
def test_ages_are_for_people(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0004, "0.4ms"), (0.0124, "12ms"), (0.999, "999ms"), (1.25, "1.2s")])
def test_latencies_are_for_people(seconds: float, text: str) -> None:
    assert latency(seconds) == text


def test_plurals() -> None:
    assert [some(1, "proxy"), some(2, "proxy"), some(0, "pass"), some(3, "engine")] == [
        "1 proxy", "2 proxies", "0 passes", "3 engines",
    ]  # fmt: skip


def test_clean_keeps_what_people_write() -> None:
    assert clean("größer → 大") == "größer → 大"
