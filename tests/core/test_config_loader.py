"""Reading a fleet file: text, notes, positions, every problem at once, and files that are no fleet at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from narwhal.config import FleetFileError, load_fleet, parse_fleet

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fleet.yaml"

MINIMAL = """\
name: f
model: m
engines:
- {id: p, url: "http://h:1", role: prefill}
- {id: d, url: "http://h:2", role: decode}
"""


def problems(text: str, **environ: str) -> list[str]:
    with pytest.raises(FleetFileError) as caught:
        parse_fleet(text, environ)
    return caught.value.problems


WRONG_EVERYWHERE = """\
nme: f
name: "a b"
engines:
- {id: a, url: "ftp://x", role: prefil}
- {id: b, url: "${FIRST}", role: decode}
- 3
- {id: b, url: "http://h:1", role: decode, attestation_url: "${SECOND}"}
slo: {ttft_s: true}
store: {endpoints: 3, username: x}
serving: {max_attempts: 4, queue_capacity: 10, prefill_timeout_s: }
engine: {kv_lease_s: 20}
recovery: {eject_after: 0, x: 1, health: {evict_windows: 2}}
slo: {ttft_s: 1}
"""

EVERYTHING_WRONG = [
    'line 13, column 1: the key "slo" was given before, on line 8',
    'name: must be letters, digits, dots, underscores and hyphens, and start with a letter or a digit, got "a b"',
    "model: is required",
    'engines[0].url: must be an address like http://10.0.0.5:8000, got "ftp://x"',
    'engines[0].role: must be prefill or decode, got "prefil"',
    "engines[1].url: the environment variable FIRST is not set",
    "engines[2]: must be a mapping of keys, got 3",
    "engines[3].attestation_url: the environment variable SECOND is not set",
    "slo.ttft_s: must be a number, got true",
    "store.endpoints: must be a list, got 3",
    "serving.max_attempts: must be at most 3, got 4",
    "serving.prefill_timeout_s: has no value",
    "recovery.eject_after: must be at least 1, got 0",
    "recovery.x: unknown key",
    "nme: unknown key; did you mean name?",
    'engines[3].id: must differ from engines[1].id, both are "b"',
    "store.username: needs store.kind etcd, got file",
    "store.password: must be given together with store.username",
    "serving.queue_timeout_s: must be more than 0 when serving.queue_capacity is given (10), got 0",
    "serving.handoff_max_age_s: must be less than engine.kv_lease_s (20), "
    "since engines free the KV of a handoff then, got 25",
    "recovery.health.evict_windows: must be at least recovery.health.probation_windows (3), "
    "since probation comes first, got 2",
]


def test_every_problem_is_reported_at_once() -> None:
    assert problems(WRONG_EVERYWHERE) == EVERYTHING_WRONG


def test_a_wrong_value_does_not_bring_relations_that_nobody_broke() -> None:
    assert problems(MINIMAL + "engine: {kv_lease_s: x}\nserving: {handoff_max_age_s: 40}\n") == [
        'engine.kv_lease_s: must be a number, got "x"'
    ]
    assert problems(MINIMAL + "store: {kind: etcd, endpoints: [http://a]}\n") == [
        'store.endpoints[0]: must be http://host:port or https://host:port, got "http://a"'
    ]
    assert problems(
        MINIMAL.replace("role: decode", "role: x, pinned: true").replace("role: p", "pinned: true, role: p")
    ) == ['engines[1].role: must be prefill or decode, got "x"']


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "file: is empty"),
        ("# nothing\n", "file: is empty"),
        ("- 1\n", "file: must be a mapping of keys such as name, model and engines"),
        ("fleet", "file: must be a mapping of keys such as name, model and engines"),
        (
            "name: f\nmodel: [\n",
            "line 3, column 1: while parsing a flow node, expected the node content, but found '<stream end>'",
        ),
        ("name: a: b\n", "line 1, column 8: mapping values are not allowed here"),
        (
            "name: f\n\tmodel: m\n",
            "line 2, column 1: while scanning for the next token, found character '\\t' that cannot start any token",
        ),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: expected a single document in the stream, but found another document"),
        ("name: !!str f\n", "line 1, column 7: tags such as tag:yaml.org,2002:str are not supported"),
        ("name: *f\n", "line 1, column 7: found undefined alias 'f'"),
        ("[" * 5000, "file: is nested too deeply"),
        ('{"a":' * 5000, "file: is nested too deeply"),
        ('{"name": "f", "name": "g",\n\t"model": 1}', 'file: the key "name" is given twice'),
        ("#" * 4_194_305, "file: must be at most 4194304 characters, got 4194305"),
    ],
)
def test_what_cannot_be_read(text: str, expected: str) -> None:
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("name: g\n", 'line 6, column 1: the key "name" was given before, on line 1'),
        ("slo: {ttft_s: 1, ttft_s: 2}\n", 'line 6, column 18: the key "ttft_s" was given before, on line 6'),
        ("1: x\n", "line 6, column 1: a key must be text, got 1"),
        ("? [a]\n: x\n", "line 6, column 3: a key must be text, got a list or a mapping"),
        ("<<: {slo: {ttft_s: 1}}\n", "line 6, column 1: merge keys (<<) are not supported"),
        ("engine_contract: &a {x: *a}\n", "line 6, column 18: holds itself"),
    ],
)
def test_what_a_mapping_must_not_hold(lines: str, expected: str) -> None:
    assert problems(MINIMAL + lines)[0] == expected


def test_json_duplicates_are_placed() -> None:
    assert problems('{"name": "f",\n "model": "m", "engines": [],\n "name": "g"}') == [
        'line 3, column 2: the key "name" was given before, on line 1',
        "engines: must name at least one engine",
    ]


@pytest.mark.parametrize("text", ["&a [x,x,x,x,x,x,x,x,x,x]", "{l: &a [1,1,1,1,1,1,1,1,1,1]}"])
def test_references_that_multiply_are_bounded(text: str) -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert problems("\n".join([*lines, f"z: {text}"])) == ["file: must hold at most 200000 values"]


def test_references_are_followed() -> None:
    text = MINIMAL.replace("role: prefill", "role: &r prefill").replace("role: decode", "role: *r")
    assert [engine.role for engine in parse_fleet(text, {}).engines] == ["prefill", "prefill"]


NOTED = """\
_: a note
_: and the same key again, which is fine for notes
_anything: {recovery: {eject_after: 0}, url: "${NOWHERE}"}
name: f
model: m
_list: [1, {}]
engines:
- {_why: small, id: p, url: "http://h:1", role: prefill}
- {id: d, url: "http://h:2", role: decode}
recovery: {_note: , health: {_x: 1, min_samples: 4}}
"""


def test_notes_are_never_read() -> None:
    fleet = parse_fleet(NOTED, {})
    assert fleet.recovery.health.min_samples == 4
    assert fleet.masked() == parse_fleet(MINIMAL + "recovery: {health: {min_samples: 4}}\n", {}).masked()


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_accepted(indent: int | str | None) -> None:
    value: dict[str, Any] = yaml.safe_load(MINIMAL)
    value["model"] = "größe \U0001f40b"
    value["slo"] = {"ttft_s": 1e-1, "_note": None}
    for ascii_only in (True, False):
        fleet = parse_fleet(json.dumps(value, indent=indent, ensure_ascii=ascii_only), {})
        assert (fleet.model, fleet.slo.ttft_s) == ("größe \U0001f40b", 0.1)


@pytest.mark.parametrize(
    ("written", "value"),
    [("3", 3.0), ("1e1", 10.0), ("1.5e+1", 15.0), ("+2", 2.0), (".5", 0.5), ("5.", 5.0), ("012", 12.0), ("0x10", 16.0)],
)
def test_numbers(written: str, value: float) -> None:
    assert parse_fleet(MINIMAL + f"slo: {{ttft_s: {written}}}\n", {}).slo.ttft_s == value


@pytest.mark.parametrize(
    "word", ["no", "on", "yes", "off", "1:30", "2024-01-01", "1_000", "'3'", '"true"', "<<", "1.2.3"]
)
def test_words_that_yaml_used_to_convert_are_text(word: str) -> None:
    assert parse_fleet(MINIMAL.replace("model: m", f"model: {word}"), {}).model == word.strip("'\"")


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_fleet("\ufeff" + MINIMAL, {}).name == "f"


def test_a_file_is_loaded_and_named(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(MINIMAL)
    assert load_fleet(file, {}) == load_fleet(str(file), {}) == parse_fleet(MINIMAL, {})
    file.write_text(MINIMAL + "recovery: {eject_after: 0}\nnope: 1\n")
    with pytest.raises(FleetFileError) as caught:
        load_fleet(file, {})
    assert caught.value.problems == ["recovery.eject_after: must be at least 1, got 0", "nope: unknown key"]
    assert str(caught.value).splitlines() == [f"{file}: {problem}" for problem in caught.value.problems]


def test_what_is_no_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"name: \xff\xfe")
    for path, start in (
        (tmp_path / "absent", "file: cannot be read: No such file or directory"),
        (tmp_path, "file: cannot be read: Is a directory"),
        (binary, "file: cannot be read: 'utf-8' codec can't decode byte 0xff in position 6"),
        ("a\0b", "file: cannot be read: embedded null"),
    ):
        with pytest.raises(FleetFileError) as caught:
            load_fleet(path, {})
        assert caught.value.problems[0].startswith(start)


@pytest.mark.case("K2")
def test_a_removed_key_returns_to_its_default() -> None:
    assert parse_fleet(MINIMAL + "recovery: {eject_after: 7, stall_s: 9}\n", {}).recovery.eject_after == 7
    after = parse_fleet(MINIMAL + "recovery: {stall_s: 9}\n", {}).recovery
    assert (after.eject_after, after.stall_s) == (3, 9)


@pytest.mark.case("K2")
def test_a_file_cut_short_is_refused_wherever_that_can_be_seen() -> None:
    """JSON always shows it. YAML shows it unless the cut falls where the rest is a whole fleet of its own."""
    as_json = json.dumps(parse_fleet(MINIMAL, {}).masked())
    for length in range(0, len(as_json), 31):
        problems(as_json[:length])
    whole = MINIMAL + "recovery:\n  eject_after: 7\n"
    for length in range(MINIMAL.index("role: prefill")):
        problems(whole[:length])
    for cut in ("recovery:", "recovery:\n  eject_after:", "recovery:\n  eject_after: ", "recovery:\n  eject_af"):
        problems(MINIMAL + cut)


def test_the_example_loads() -> None:
    fleet = load_fleet(EXAMPLE, {})
    assert [engine.role for engine in fleet.engines] == ["prefill", "prefill", "decode", "decode"]
    assert all(engine.url.startswith("http://127.0.0.1:") for engine in fleet.engines)


def survives(text: str) -> None:
    found = ["fleet: fine"]
    try:
        parse_fleet(text, {"NAME": "x"})
    except FleetFileError as error:
        found = error.problems
    assert found
    assert all(": " in problem and "\n" not in problem for problem in found)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_is_a_fleet_or_an_error(text: str) -> None:
    survives(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}[]:,&*a-?|>!%#'\"\\ \n\t_<1.e~$@`"))
def test_any_punctuation_is_a_fleet_or_an_error(text: str) -> None:
    survives(text)


KEYS = st.sampled_from(
    [
        "name",
        "model",
        "engines",
        "id",
        "url",
        "role",
        "store",
        "endpoints",
        "password",
        "engine",
        "api_key",
        "recovery",
        "health",
        "slo",
        "ttft_s",
        "engine_contract",
        "attestation_url",
        "tls",
        "serving",
        "queue_capacity",
        "_x",
        "x",
        "0",
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["${NAME}", "${NONE}", "http://h:1", "prefill", "etcd", "-"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=30
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES))
def test_any_tree_is_a_fleet_or_an_error(tree: dict[str, Any]) -> None:
    survives(json.dumps(tree))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_good_file_with_one_thing_changed_is_a_fleet_or_an_error(data: st.DataObject) -> None:
    tree = yaml.safe_load(EXAMPLE.read_text())
    section = data.draw(st.sampled_from([key for key, value in tree.items() if isinstance(value, dict)]))
    tree[section][data.draw(st.sampled_from(sorted(tree[section])))] = data.draw(VALUES)
    survives(json.dumps(tree))
