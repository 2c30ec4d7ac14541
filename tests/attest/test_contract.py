"""The contract file: what is taken, what is refused and how, and a digest that depends on the content alone."""

from pathlib import Path

import pytest

from narwhal.attest.contract import digest, load_contract
from narwhal.config import FleetFileError


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "contract.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


YAML = """
# what the deployment says
_note: never read
image: "sha256:0f1e"
flags: {block_size: 32, eager: true}
weights:
  - model-00001.safetensors
"""


def test_fields_come_from_yaml_and_notes_do_not(tmp_path: Path) -> None:
    contract = load_contract(written(tmp_path, YAML))
    assert contract.fields == {
        "image": "sha256:0f1e",
        "flags": {"block_size": 32, "eager": True},
        "weights": ["model-00001.safetensors"],
    }


def test_the_digest_is_of_the_content_and_not_of_the_file(tmp_path: Path) -> None:
    yaml = load_contract(written(tmp_path, YAML))
    json = load_contract(
        written(
            tmp_path,
            '{"weights": ["model-00001.safetensors"], "flags": {"eager": true, "block_size": 32},\n\n'
            ' "image": "sha256:0f1e"}',
        )
    )
    assert yaml.digest == json.digest
    # Anybody can make it: sha256 of sorted JSON without white space.
    assert digest({"b": 1, "a": [True]}) == "sha256:708747538ba81fd60b5aac8c646370de5e24abf70ab1872f67458a5a4f3af05d"
    changed = load_contract(written(tmp_path, YAML.replace("32", "16")))
    assert changed.digest != yaml.digest


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["file: is empty"]),
        ("- a\n", ["file: must be a mapping of fields"]),
        ("_note: only\n", ["file: names no field; a contract without one says nothing"]),
        ("process: {version: 1}\na: 1\n", ["process: is what narwhal-attest says itself; leave it out"]),
        ("digest: x\n", ["digest: is what narwhal-attest says itself; leave it out"]),
        ("a: 1\na: 2\n", ['line 2, column 1: the key "a" was given before, on line 1']),
        ("a: {b: [1e999]}\n", ["a.b[0]: must be a finite number"]),
        ("a: 99999999999999999999\n", ["a: must be a number of at most 64 bits, or text"]),
        ('{"a": "\\ud800"}', ["a: holds half a character"]),
        ("a: [\n", None),
        (b"a: \xff\n", None),
    ],
)
def test_what_cannot_be_attested_is_refused_with_its_place(
    tmp_path: Path, text: str | bytes, problems: list[str] | None
) -> None:
    with pytest.raises(FleetFileError) as raised:
        load_contract(written(tmp_path, text))
    assert raised.value.problems
    if problems is not None:
        assert raised.value.problems == problems


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError) as raised:
        load_contract(tmp_path / "nowhere.yaml")
    assert raised.value.problems == ["file: cannot be read: No such file or directory"]
