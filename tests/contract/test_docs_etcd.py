"""docs/etcd.md says what the code does."""

import re
from pathlib import Path

from narwhal.config import FleetConfig, load_fleet
from narwhal.control.candidate import RETURN_S
from narwhal.control.core.history import MOST_EPOCHS
from narwhal.control.core.records import EventKind
from narwhal.control.store import etcd
from narwhal.control.store.etcd_client import EtcdSettings, Keys

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "etcd.md").read_text()


def example(tmp_path: Path) -> FleetConfig:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    return load_fleet(file, {"NARWHAL_ETCD_PASSWORD": "secret"})


def test_the_example_is_a_valid_fleet_file(tmp_path: Path) -> None:
    config = example(tmp_path)
    assert (config.store.kind, len(config.store.endpoints)) == ("etcd", 3)
    assert (config.lease.ttl_s, config.lease.safety_margin_s) == (3, 0.5)
    assert "1.5 s with the defaults of 3 and 0.5" in PAGE
    assert f"{config.store.prefix}/{config.name}/" in PAGE


def test_every_key_is_listed_and_no_other() -> None:
    settings = EtcdSettings(endpoints=(), prefix="/narwhal", fleet="my-fleet", ttl_s=3, safety_margin_s=0.5)
    keys = Keys(settings)
    used = {value for name, value in vars(keys).items() if name not in ("first", "last", "_names")}
    listed = re.findall(r"^\| `([a-z]+)(?:/…)?` \| ", PAGE, re.MULTILINE)
    assert {key.decode().removeprefix("/narwhal/my-fleet/").rstrip("/") for key in used} == set(listed)
    assert f"the last {MOST_EPOCHS} epochs" in PAGE


def test_sizes_and_words_are_those_of_the_code() -> None:
    shares = ", ".join(f"{100 * share:.0f}" for share in sorted(etcd._WARN_AT)[:-1])
    assert f"when {shares} and {100 * max(etcd._WARN_AT):.0f} % of 2 GiB are reached" in PAGE
    assert etcd.DEFAULT_QUOTA_BYTES == 2 * 1024**3
    assert f"(`{EventKind.STORE_WARNING.value}`)" in PAGE
    assert "is full and refuses every write (NOSPACE)" in PAGE
    assert RETURN_S == 2.0
    assert "has two seconds to lead again" in PAGE
