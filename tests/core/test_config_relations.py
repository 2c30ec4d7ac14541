"""What fields of the fleet file demand of each other: every relation, broken and just kept."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from narwhal.config import EngineConfig, FleetConfig, FleetFileError, ServingConfig, parse_fleet
from narwhal.config.relations import advice
from narwhal.vocabulary import Phase


def engine(name: str, role: str = "prefill", **more: Any) -> dict[str, Any]:
    return {"id": name, "url": f"http://{name}:1", "role": role, **more}


PAIR = [engine("p"), engine("d", "decode")]
ETCD = {"kind": "etcd", "endpoints": ["http://h:2379"]}
TLS_ETCD = {"kind": "etcd", "endpoints": ["https://h:2379"]}
ATTESTED = [engine("p", attestation_url="http://p:2/"), engine("d", "decode", attestation_url="http://d:2/")]


def problems(**sections: Any) -> list[str]:
    fleet = {"name": "f", "model": "m", "engines": PAIR, **sections}
    try:
        parse_fleet(yaml.safe_dump(fleet), {})
    except FleetFileError as error:
        return error.problems
    return []


BROKEN: list[tuple[dict[str, Any], list[str]]] = [
    ({"engines": []}, ["engines: must name at least one engine"]),
    (
        {"engines": [*PAIR, engine("p") | {"url": "http://x"}]},
        ['engines[2].id: must differ from engines[0].id, both are "p"'],
    ),
    (
        {"engines": [*PAIR, engine("x") | {"url": "HTTP://D:1/"}]},
        ['engines[2].url: must differ from engines[1].url, both are "http://d:1"'],
    ),
    (
        {"engines": [engine("a", pinned=True), engine("b", pinned=True)]},
        ["engines: none may serve decode, since every engine is pinned to prefill"],
    ),
    (
        {"engines": [engine("a"), engine("b", pinned=True)], "controller": {"min_decode": 2}},
        ["controller.min_decode: must be at most 1, the number of engines that may serve decode, got 2"],
    ),
    (
        {"controller": {"min_prefill": 2}},
        ["controller.min_decode: must be at most 0, what controller.min_prefill (2) leaves of 2 engines, got 1"],
    ),
    ({"store": {"kind": "etcd"}}, ["store.endpoints: must be given when store.kind is etcd"]),
    ({"store": {"endpoints": ["http://h:1"]}}, ["store.endpoints: needs store.kind etcd, got file"]),
    ({"store": {"ca": "x"}}, ["store.ca: needs store.kind etcd, got file"]),
    (
        {"store": ETCD | {"endpoints": ["http://h:1", "http://h:1/"]}},
        ['store.endpoints[1]: must differ from store.endpoints[0], both are "http://h:1"'],
    ),
    (
        {"store": ETCD | {"endpoints": ["http://h:1", "https://h:2"]}},
        ["store.endpoints: must be all http or all https, got both"],
    ),
    (
        {"store": ETCD | {"endpoints": ["http://h"]}},
        ['store.endpoints[0]: must be http://host:port or https://host:port, got "http://h"'],
    ),
    ({"store": ETCD | {"ca": "x"}}, ["store.ca: needs https addresses in store.endpoints, got http"]),
    ({"store": TLS_ETCD | {"cert": "x"}}, ["store.key: must be given together with store.cert"]),
    ({"store": TLS_ETCD | {"key": "x"}}, ["store.cert: must be given together with store.key"]),
    ({"store": ETCD | {"username": "x"}}, ["store.password: must be given together with store.username"]),
    ({"store": ETCD | {"password": "x"}}, ["store.username: must be given together with store.password"]),
    (
        {"tls": {"cert": "x"}},
        ["tls.ca: must be given together with tls.cert", "tls.key: must be given together with tls.cert"],
    ),
    ({"tls": {"ca": "x", "key": "y"}}, ["tls.cert: must be given together with tls.ca and tls.key"]),
    (
        {"store": ETCD, "lease": {"ttl_s": 2.5}},
        ["lease.ttl_s: must be whole seconds when store.kind is etcd, got 2.5"],
    ),
    (
        {"lease": {"ttl_s": 3, "safety_margin_s": 2}},
        [
            "lease.safety_margin_s: must be less than two thirds of lease.ttl_s (3), "
            "else the holder would fence itself between two renewals, got 2"
        ],
    ),
    (
        {"controller": {"monitor_interval_s": 2, "stage_timeout_s": 1.5}},
        ["controller.stage_timeout_s: must be 0 or at least controller.monitor_interval_s (2), got 1.5"],
    ),
    (
        {"serving": {"queue_capacity": 8}},
        ["serving.queue_timeout_s: must be more than 0 when serving.queue_capacity is given (8), got 0"],
    ),
    (
        {"serving": {"queue_timeout_s": 1.5}},
        ["serving.queue_capacity: must be more than 0 when serving.queue_timeout_s is given (1.5), got 0"],
    ),
    (
        {"serving": {"handoff_max_age_s": 30}},
        [
            "serving.handoff_max_age_s: must be less than engine.kv_lease_s (30), "
            "since engines free the KV of a handoff then, got 30"
        ],
    ),
    (
        {"engine": {"kv_lease_s": 20}},
        [
            "serving.handoff_max_age_s: must be less than engine.kv_lease_s (20), "
            "since engines free the KV of a handoff then, got 25"
        ],
    ),
    ({"serving": {"retry_base_s": 2}}, ["serving.retry_base_s: must be at most serving.retry_cap_s (1), got 2"]),
    (
        {"controller": {"thresholds": {"shrink": 1.0}}},
        [
            "controller.thresholds.shrink: must be less than controller.thresholds.expand (1), "
            "since a role cannot give and take at once, got 1"
        ],
    ),
    (
        {"recovery": {"health": {"evict_windows": 2}}},
        [
            "recovery.health.evict_windows: must be at least recovery.health.probation_windows (3), "
            "since probation comes first, got 2"
        ],
    ),
    (
        {"engine": {"first_token_timeout_s": 25}},
        [
            "engine.kv_first_pull_timeout_s: must be at least engine.first_token_timeout_s (25), "
            "since first transfers take longer, got 20"
        ],
    ),
    (
        {"standby": {"max_handoff_age_s": 1}},
        [
            "standby.max_handoff_age_s: must be more than controller.monitor_interval_s (1), "
            "since a handoff is written once per monitor pass, got 1"
        ],
    ),
    (
        {"proxy": {"placement_max_age_s": 1}},
        ["proxy.placement_max_age_s: must be 0 (for ever) or more than 1, the interval of control's heartbeats, got 1"],
    ),
    (
        {"journal": {"max_bytes": 1048575}},
        ["journal.max_bytes: must be 0 (no journal) or at least 1048576, got 1048575"],
    ),
]

LEFT_OF = (
    "a probe leaves of engine.kv_lease_s (30), else an engine that stops for longer than that can go on "
    "with wrong answers; or set engine.decode_read_timeout_s below it, got"
)
SILENT = "recovery.silent_leg_s: should be more than 0 and"
ADVISED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"recovery": {"silent_leg_s": 22}}, []),
    ({"recovery": {"silent_leg_s": 22.5}}, [f"{SILENT} at most 22, what {LEFT_OF} 22.5"]),
    ({"recovery": {"silent_leg_s": 120}}, [f"{SILENT} at most 22, what {LEFT_OF} 120"]),
    ({"recovery": {"silent_leg_s": 0}}, [f"{SILENT} at most 22, what {LEFT_OF} 0"]),
    ({"recovery": {"silent_leg_s": 120}, "engine": {"decode_read_timeout_s": 29}}, []),
    ({"engine": {"first_token_timeout_s": 8}}, [f"{SILENT} at most 19, what {LEFT_OF} 20"]),
    ({"engine": {"health_timeout_s": 8}}, []),
    ({"controller": {"monitor_interval_s": 2.5}}, [f"{SILENT} at most 17.5, what {LEFT_OF} 20"]),
    ({"controller": {"monitor_interval_s": 10}}, [f"{SILENT} less than {LEFT_OF} 20"]),
    ({"engine": {"kv_lease_s": 60}, "recovery": {"silent_leg_s": 50}}, []),
]

UNATTESTED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"engines": ATTESTED},
        [
            "engines[0].attestation_url: needs engine_contract, against which the document is checked",
            "engines[1].attestation_url: needs engine_contract, against which the document is checked",
        ],
    ),
    (
        {"engines": [ATTESTED[0], PAIR[1]], "engine_contract": {"image": "x"}},
        ["engines[1].attestation_url: must be given, since engine_contract is"],
    ),
    ({"engines": ATTESTED, "engine_contract": {}}, ["engine_contract: must name at least one field"]),
]

KEPT: list[dict[str, Any]] = [
    {"engines": [engine("only")]},
    {"engines": [engine("p", pinned=True), engine("d", "decode", pinned=True)]},
    {"engines": [engine("p"), engine("q")]},
    {"engines": [*PAIR, engine("e")], "controller": {"min_prefill": 2}},
    {"engines": ATTESTED, "engine_contract": {"image": "x"}},
    {"store": ETCD},
    {"store": TLS_ETCD | {"ca": "x", "cert": "y", "key": "z"}},
    {"store": ETCD | {"username": "x", "password": "y"}},
    {"store": {"path": "elsewhere"}},
    {"lease": {"ttl_s": 2.5, "safety_margin_s": 1.6}},
    {"controller": {"monitor_interval_s": 0.05, "stage_timeout_s": 0.05}},
    {"controller": {"stage_timeout_s": 0, "monitor_interval_s": 7}},
    # A deadline shorter than a leg's own limits is fine: it ends everything.
    {"serving": {"request_timeout_s": 2, "queue_capacity": 1, "queue_timeout_s": 60}},
    {"serving": {"handoff_max_age_s": 29.9}},
    {"serving": {"retry_base_s": 1}},
    {"controller": {"thresholds": {"shrink": 0.99}}},
    {"recovery": {"health": {"evict_windows": 3}}},
    {"engine": {"first_token_timeout_s": 20}},
    {"standby": {"max_handoff_age_s": 1.1}},
    {"proxy": {"placement_max_age_s": 0}},
    {"proxy": {"placement_max_age_s": 1.1}},
    {"tls": {"ca": "a", "cert": "b", "key": "c"}},
    {"recovery": {"stall_s": 0, "silent_leg_s": 0, "liveness_every": 0}},
]


@pytest.mark.rule("R7")
@pytest.mark.parametrize(("sections", "expected"), UNATTESTED)
def test_attestation_takes_a_document_and_a_contract(sections: dict[str, Any], expected: list[str]) -> None:
    assert problems(**sections) == expected
    assert problems(engines=ATTESTED, engine_contract={"image": "x"}) == []


@pytest.mark.parametrize(("sections", "expected"), BROKEN)
def test_broken(sections: dict[str, Any], expected: list[str]) -> None:
    assert problems(**sections) == expected


@pytest.mark.parametrize("sections", KEPT)
def test_kept(sections: dict[str, Any]) -> None:
    assert problems(**sections) == []


@pytest.mark.parametrize(("sections", "expected"), ADVISED)
def test_what_is_better_otherwise_is_advised_and_refuses_no_file(sections: dict[str, Any], expected: list[str]) -> None:
    fleet = parse_fleet(yaml.safe_dump({"name": "f", "model": "m", "engines": PAIR, **sections}), {})
    assert [f"{found.path}: {found.sentence}" for found in advice(fleet)] == expected


def test_a_value_built_in_code_keeps_them_too() -> None:
    with pytest.raises(ValidationError, match=r"serving\.retry_base_s: must be at most serving\.retry_cap_s"):
        FleetConfig(
            name="f",
            model="m",
            engines=(EngineConfig(id="e", url="http://h:1", role=Phase.DECODE),),
            serving=ServingConfig(retry_base_s=2),
        )
