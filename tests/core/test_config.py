"""The fleet file's values: defaults, bounds, what is converted and what is not. Rows typed from the specification."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from narwhal.config import (
    EngineConfig,
    EngineSettings,
    FleetConfig,
    FleetFileError,
    ProxySettings,
    fleet_schema,
    parse_fleet,
)
from narwhal.vocabulary import Phase

MINIMAL = """
name: f
model: m
engines:
  - {id: p, url: "http://127.0.0.1:1", role: prefill}
  - {id: d, url: "http://127.0.0.1:2", role: decode}
"""

DEFAULTS: list[tuple[str, Any]] = [
    ("schema_", "narwhal.fleet"),
    ("schema_version", 1),
    ("engine_contract", None),
    ("slo.ttft_s", 2.0),
    ("slo.tpot_s", 0.1),
    ("store.kind", "file"),
    ("store.path", "run/"),
    ("store.endpoints", ()),
    ("store.ca", None),
    ("store.cert", None),
    ("store.key", None),
    ("store.username", None),
    ("store.password", None),
    ("journal.path", None),
    ("journal.max_bytes", 268435456),
    ("lease.ttl_s", 3),
    ("lease.safety_margin_s", 0.5),
    ("standby.probe_interval_s", 0.25),
    ("standby.takeover_after", 4),
    ("standby.max_handoff_age_s", 30),
    ("controller.monitor_interval_s", 1.0),
    ("controller.monitor_failure_limit", 5),
    ("controller.stage_timeout_s", 0),
    ("controller.mode", "advisory"),
    ("controller.min_prefill", 1),
    ("controller.min_decode", 1),
    ("controller.thresholds.expand", 1.0),
    ("controller.thresholds.shrink", 0.5),
    ("controller.thresholds.cooldown_s", 10),
    ("controller.thresholds.sustained_intervals", 3),
    ("controller.thresholds.dwell_s", 30),
    ("controller.thresholds.risk_window_s", 60),
    ("serving.max_connections", 512),
    ("serving.max_attempts", 1),
    ("serving.queue_capacity", 0),
    ("serving.queue_timeout_s", 0),
    ("serving.request_timeout_s", 600),
    ("serving.prefill_timeout_s", 120),
    ("serving.retry_base_s", 0.1),
    ("serving.retry_cap_s", 1.0),
    ("serving.retry_budget", 10),
    ("serving.retry_replenish", 0.1),
    ("serving.handoff_max_age_s", 25),
    ("serving.max_request_bytes", 4194304),
    ("serving.graceful_timeout_s", 30),
    ("engine.connector", "vllm-nixl"),
    ("engine.control_connections", 0),
    ("engine.first_token_timeout_s", 5),
    ("engine.kv_first_pull_timeout_s", 20),
    ("engine.decode_read_timeout_s", 60),
    ("engine.connect_timeout_s", 10),
    ("engine.pool_timeout_s", 5),
    ("engine.health_timeout_s", 5),
    ("engine.keepalive_s", 4),
    ("engine.kv_lease_s", 30),
    ("engine.tokenize", False),
    ("engine.tokenize_timeout_s", 2),
    ("engine.api_key", None),
    ("recovery.eject_after", 3),
    ("recovery.readmit_every", 10),
    ("recovery.liveness_every", 10),
    ("recovery.liveness_misses", 2),
    ("recovery.failure_quarantine_s", 0),
    ("recovery.stall_s", 3),
    ("recovery.silent_leg_s", 20),
    ("recovery.probe_tokens", 16),
    ("recovery.relapse_window_s", 60),
    ("recovery.ramp_s", 30),
    ("recovery.health.window_s", 30),
    ("recovery.health.drift_band", 2.0),
    ("recovery.health.min_samples", 3),
    ("recovery.health.probation_windows", 3),
    ("recovery.health.evict_windows", 5),
    ("recovery.health.recovery_windows", 3),
    ("proxy.placement_max_age_s", 600),
    ("tls.ca", None),
    ("tls.cert", None),
    ("tls.key", None),
    ("auth.tokens_file", None),
]
# Required, or without a stated default; and the one limit that the table leaves open: what clients may take.
SOON = "must be at least 0.05, got"
BEYOND_THE_TABLE = {"name", "model", "engines", "store.prefix", "serving.client_timeout_s"}


def at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = getattr(value, key)
    return value


def leaves(value: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name in type(value).model_fields:
        inner = getattr(value, name)
        path = f"{prefix}{name}"
        found |= leaves(inner, f"{path}.") if hasattr(type(inner), "model_fields") else {path}
    return found


def problems(text: str, **environ: str) -> list[str]:
    with pytest.raises(FleetFileError) as caught:
        parse_fleet(text, environ)
    return caught.value.problems


@pytest.mark.parametrize(("path", "default"), DEFAULTS)
def test_default(path: str, default: Any) -> None:
    value = at(parse_fleet(MINIMAL, {}), path)
    assert value == default
    assert isinstance(value, bool) == isinstance(default, bool)


def test_there_is_no_key_beyond_the_table() -> None:
    assert leaves(parse_fleet(MINIMAL, {})) == {path for path, _ in DEFAULTS} | BEYOND_THE_TABLE


def test_engine_defaults() -> None:
    engine = parse_fleet(MINIMAL, {}).engines[0]
    assert (engine.id, engine.url, engine.role) == ("p", "http://127.0.0.1:1", Phase.PREFILL)
    assert (engine.pinned, engine.attestation_url) == (False, None)
    assert (engine.max_inflight, engine.max_inflight_tokens) == (0, 0)


@pytest.mark.rule("M3")
@pytest.mark.parametrize(
    ("section", "bound"),
    [
        ("{}", 10.0),
        ("{monitor_interval_s: 0.2}", 5.0),
        ("{monitor_interval_s: 2}", 20.0),
        ("{stage_timeout_s: 7}", 7.0),
    ],
)
def test_the_stage_bound_is_derived_unless_given(section: str, bound: float) -> None:
    assert parse_fleet(f"{MINIMAL}controller: {section}\n", {}).controller.stage_timeout == bound


@pytest.mark.rule("V1")
@pytest.mark.parametrize(("engines", "given", "applies"), [(1, 0, 4), (2, 0, 4), (3, 0, 6), (8, 0, 16), (8, 3, 3)])
def test_the_control_pool_is_derived_unless_given(engines: int, given: int, applies: int) -> None:
    fleet = FleetConfig(
        name="f",
        model="m",
        engines=tuple(EngineConfig(id=f"e{i}", url=f"http://h:{i + 1}", role=Phase.DECODE) for i in range(engines)),
        engine=EngineSettings(control_connections=given),
    )
    assert fleet.control_connections == applies
    assert fleet.engine_set() == frozenset(f"e{i}" for i in range(engines))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("recovery: {eject_after: 0}", "recovery.eject_after: must be at least 1, got 0"),
        # More often than that is a busy loop.
        ("controller: {monitor_interval_s: 0.000001}", f"controller.monitor_interval_s: {SOON} 1e-06"),
        ("standby: {probe_interval_s: 0.049}", f"standby.probe_interval_s: {SOON} 0.049"),
        ("lease: {ttl_s: 0.01, safety_margin_s: 0.001}", f"lease.ttl_s: {SOON} 0.01"),
        ("recovery: {health: {window_s: 0.0}}", f"recovery.health.window_s: {SOON} 0"),
        ("auth: {tokens_file: t}", "auth.tokens_file: this release does not check tokens; leave it out"),
        ("recovery: {eject_after: -1}", "recovery.eject_after: must be at least 1, got -1"),
        ("recovery: {eject_after: 1.0}", "recovery.eject_after: must be a whole number, got 1.0"),
        ("recovery: {eject_after: true}", "recovery.eject_after: must be a whole number, got true"),
        ('recovery: {eject_after: "3"}', 'recovery.eject_after: must be a whole number, got "3"'),
        ("recovery: {eject_after: [3]}", "recovery.eject_after: must be a whole number, got a list"),
        ("recovery: {eject_after: 3e9}", "recovery.eject_after: must be a whole number, got 3000000000.0"),
        ("recovery: {eject_after: 3000000000}", "recovery.eject_after: must be at most 2147483647, got 3000000000"),
        ("recovery: {eject_afer: 3}", "recovery.eject_afer: unknown key; did you mean eject_after?"),
        ("recovery: {health: {windows_s: 3}}", "recovery.health.windows_s: unknown key; did you mean window_s?"),
        ("recovery: {colour: 3}", "recovery.colour: unknown key"),
        ("recovery: 3", "recovery: must be a mapping of keys, got 3"),
        ("recovery: []", "recovery: must be a mapping of keys, got a list"),
        ("recovery:", "recovery: has no value"),
        ("recovery: {eject_after: }", "recovery.eject_after: has no value"),
        ("recovery: {health: {drift_band: 1}}", "recovery.health.drift_band: must be more than 1, got 1"),
        ("recover: {}", "recover: unknown key; did you mean recovery?"),
        ('"a\\nb": {}', '"a\\nb": unknown key'),
        ("engine: {api_key: }", "engine.api_key: has no value"),
        ("tls: {ca: }", "tls.ca: has no value"),
        ("engine_contract:", "engine_contract: has no value"),
        ("colour:", "colour: unknown key"),
        ("store: {kind: etcd, endpoints: [~]}", "store.endpoints[0]: has no value"),
        ("slo: {ttft_s: 0}", "slo.ttft_s: must be more than 0, got 0"),
        ("slo: {ttft_s: true}", "slo.ttft_s: must be a number, got true"),
        ('slo: {ttft_s: "2"}', 'slo.ttft_s: must be a number, got "2"'),
        ("slo: {ttft_s: .nan}", 'slo.ttft_s: must be a number, got ".nan"'),
        ("slo: {ttft_s: 1e999}", "slo.ttft_s: must be a finite number, got inf"),
        ("slo: {ttft_s: 40000000}", "slo.ttft_s: must be at most 31536000, got 40000000"),
        ("serving: {max_attempts: 0}", "serving.max_attempts: must be at least 1, got 0"),
        ("serving: {max_attempts: 4}", "serving.max_attempts: must be at most 3, got 4"),
        ("engine: {tokenize: 1}", "engine.tokenize: must be true or false, got 1"),
        ("engine: {tokenize: no}", 'engine.tokenize: must be true or false, got "no"'),
        ("engine: {connector: x}", 'engine.connector: must be vllm-nixl, got "x"'),
        ("engine: {api_key: 5}", "engine.api_key: must be text (put it in quotes)"),
        ('engine: {api_key: ""}', "engine.api_key: must not be empty"),
        (
            'engine: {api_key: "s3cret\\r\\nX: 1"}',
            "engine.api_key: must be printable ASCII without spaces, since it is sent in an HTTP header",
        ),
        ("controller: {mode: on}", 'controller.mode: must be off, advisory or auto, got "on"'),
        ("store: {kind: redis}", 'store.kind: must be file or etcd, got "redis"'),
        ("store: {path: 5}", "store.path: must be text, got 5"),
        ("store: {path: ''}", "store.path: must not be empty"),
        ("store: {path: '${DIR}'}", "store.path: only a URL or a secret may be read from the environment"),
        ("store: {prefix: narwhal}", 'store.prefix: must be a path of plain names such as /narwhal, got "narwhal"'),
        ("schema: narwhal.handoff", 'schema: must be narwhal.fleet, got "narwhal.handoff"'),
        ("schema_version: 2", "schema_version: must be 1, the only version that this release reads, got 2"),
        ("schema_version: true", "schema_version: must be a whole number, got true"),
    ],
)
def test_a_wrong_value_is_refused(line: str, problem: str) -> None:
    assert problems(f"{MINIMAL}{line}\n") == [problem]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("127.0.0.1:1", 'must be an address like http://10.0.0.5:8000, got "127.0.0.1:1"'),
        ("ftp://h:1", 'must be an address like http://10.0.0.5:8000, got "ftp://h:1"'),
        ("http://", 'must be an address like http://10.0.0.5:8000, got "http://"'),
        ("http://h h:1", 'must be an address like http://10.0.0.5:8000, got "http://h h:1"'),
        ("http://h:1\\n", 'must be an address like http://10.0.0.5:8000, got "http://h:1\\n"'),
        ("http://h:0", 'must have a port between 1 and 65535, got "http://h:0"'),
        ("http://h:65536", 'must have a port between 1 and 65535, got "http://h:65536"'),
        ("http://[::g]:1", 'must be an address like http://10.0.0.5:8000, got "http://[::g]:1"'),
        ("http://[1:2]:1", 'must name an IPv6 address between the brackets, got "http://[1:2]:1"'),
        ("http://h:1/v1", 'must be scheme, host and port without a path, got "http://h:1/v1"'),
        ("http://u:s3cret@h:1", "must not carry a user name or a password"),
        ("http://${HOST}:1", "${NAME} must be the whole value, not a part of it"),
        ("${NOWHERE}", "the environment variable NOWHERE is not set"),
    ],
)
def test_a_wrong_address_is_refused(url: str, problem: str) -> None:
    assert problems(MINIMAL.replace("http://127.0.0.1:1", url)) == [f"engines[0].url: {problem}"]


@pytest.mark.parametrize(
    ("url", "becomes"),
    [
        ("http://h", "http://h"),
        ("HTTP://Host.Name:8000/", "http://host.name:8000"),
        ("https://h_1:08000", "https://h_1:8000"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("${ENGINE}", "http://from.env:3"),
    ],
)
def test_an_address_has_one_spelling(url: str, becomes: str) -> None:
    text = MINIMAL.replace("http://127.0.0.1:1", url)
    assert parse_fleet(text, {"ENGINE": "http://from.env:3/"}).engines[0].url == becomes


def test_what_came_from_the_environment_is_not_told() -> None:
    text = MINIMAL.replace("http://127.0.0.1:1", "${ENGINE}")
    assert problems(text, ENGINE="s3cret") == [
        "engines[0].url: must be an address like http://10.0.0.5:8000, got the value of the environment variable ENGINE"
    ]


@pytest.mark.parametrize("name", ["", "-a", ".", "a b", "a/b", "ä", "a\\n", "a" * 64])
def test_names_are_plain(name: str) -> None:
    for text, path in (
        (MINIMAL.replace("id: p", f'id: "{name}"'), "engines[0].id"),
        (MINIMAL.replace("name: f", f'name: "{name}"'), "name"),
    ):
        (problem,) = problems(text)
        assert problem.startswith(f"{path}: must be ")


def test_whole_numbers_stand_for_seconds() -> None:
    value = parse_fleet(MINIMAL + "slo: {ttft_s: 3}\n", {}).slo.ttft_s
    assert value == 3.0
    assert isinstance(value, float)


def test_values_are_frozen_and_check_themselves() -> None:
    fleet = parse_fleet(MINIMAL, {})
    with pytest.raises(ValidationError):
        fleet.slo.__setattr__("ttft_s", 1.0)
    with pytest.raises(ValidationError):
        EngineSettings(keepalive_s=0)


SECRETS = """
store: {kind: etcd, endpoints: ["http://h:2379"], username: u, password: "${PW}"}
engine: {api_key: "${KEY}"}
"""


def test_secrets_come_from_the_environment_and_do_not_leave() -> None:
    fleet = parse_fleet(MINIMAL + SECRETS, {"PW": "s3cret-pw", "KEY": "s3cret-key"})
    assert fleet.store.password is not None
    assert fleet.store.password.get_secret_value() == "s3cret-pw"
    shown = fleet.masked()
    assert (shown["store"]["password"], shown["engine"]["api_key"]) == ("***", "***")
    for text in (repr(fleet), str(fleet), json.dumps(shown), repr(fleet.proxy_settings()), fleet.model_dump_json()):
        assert "s3cret" not in text


def test_secrets_are_not_in_the_errors_of_the_model_either() -> None:
    with pytest.raises(ValidationError) as caught:
        EngineSettings.model_validate({"api_key": "s3cret key"})
    assert "s3cret" not in str(caught.value)


def test_what_is_shown_can_be_read_again() -> None:
    text = MINIMAL + "engine_contract: {image: a, digest: null}\nserving: {queue_capacity: 3, queue_timeout_s: 1}\n"
    text = text.replace("role:", 'attestation_url: "http://h:7/x?y=1", role:')
    fleet = parse_fleet(text, {})
    assert parse_fleet(json.dumps(fleet.masked()), {}) == fleet


def test_a_proxy_gets_its_part_with_the_secret() -> None:
    text = (
        MINIMAL
        + "engine: {api_key: k, keepalive_s: 2}\nserving: {max_attempts: 2}\nrecovery: {stall_s: 1}\nslo: {ttft_s: 9}\n"
    )
    fleet = parse_fleet(text + "proxy: {placement_max_age_s: 0}\n", {})
    settings = fleet.proxy_settings()
    sent = settings.to_json()
    assert set(json.loads(sent)) == {"name", "model", "slo", "serving", "engine", "recovery", "proxy"}
    received = ProxySettings.from_json(sent)
    assert received == settings
    assert received.engine.api_key is not None
    assert received.engine.api_key.get_secret_value() == "k"
    assert (received.engine, received.serving, received.recovery) == (fleet.engine, fleet.serving, fleet.recovery)
    assert (received.slo, received.proxy) == (fleet.slo, fleet.proxy)


def test_a_proxy_ignores_what_a_newer_control_sends_besides() -> None:
    settings = parse_fleet(MINIMAL, {}).proxy_settings()
    sent = json.loads(settings.to_json())
    sent["weather"] = {"x": 1}
    sent["recovery"]["health"]["phase_of_the_moon"] = 3
    assert ProxySettings.from_json(json.dumps(sent).encode()) == settings


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "settings: not JSON"),
        (b"\xff", "settings: not JSON"),
        (b"[]", "file: must be a mapping of keys, got a list"),
        (b'{"name": "f"}', "model: is required"),
        (b'{"name": "f", "model": "m", "slo": {"ttft_s": NaN}}', "slo.ttft_s: must be a finite number, got nan"),
        (b'{"name": "f", "model": "m", "slo": 3}', "slo: must be a mapping of keys, got 3"),
    ],
)
def test_a_proxy_refuses_settings_that_make_no_sense(data: bytes, problem: str) -> None:
    with pytest.raises(FleetFileError) as caught:
        ProxySettings.from_json(data)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


def _descriptions(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    objects = [("", schema), *schema["$defs"].items()]
    return [(f"{title}.{key}", value) for title, item in objects for key, value in item.get("properties", {}).items()]


def test_the_schema_says_what_the_loader_does() -> None:
    schema = fleet_schema()
    assert schema["required"] == ["name", "model", "engines"]
    described = _descriptions(schema)
    assert len(described) > len(DEFAULTS)
    assert [key for key, value in described if not value.get("description") and "$ref" not in value] == []
    assert [key for key, value in described if key.endswith("_s") and "seconds" not in value["description"]] == []
    for item in (schema, *schema["$defs"].values()):
        if item.get("type") == "object":
            assert item["additionalProperties"] is False
            assert set(item["patternProperties"]) == {"^_"}
    assert "null" not in json.dumps(schema)
