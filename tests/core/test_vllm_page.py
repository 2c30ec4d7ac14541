"""docs/vllm.md names settings that exist, with the defaults that they have, and links that lead somewhere."""

import re
from pathlib import Path

from narwhal.config import parse_fleet
from narwhal.config.schema import rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")


def test_every_setting_exists_and_has_the_default_that_is_told() -> None:
    known = {row.path: row.default.strip("`") for row in rows()}
    named = set(re.findall(r"`((?:engine|serving|recovery|controller|proxy)\.[a-z_]+)`", PAGE))
    assert len(named) > 8
    assert named - known.keys() == set()
    told = dict(re.findall(r"`([a-z]+\.[a-z_]+)` \(([0-9.]+)\)", PAGE))
    assert len(told) > 8
    assert told == {name: known[name] for name in told}


def test_the_fleet_file_loads() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert parse_fleet(block, {}).engine_set() == {"prefill-0", "decode-0", "decode-1"}


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, anchor = target.partition("#")
        assert not file or (ROOT / "docs" / file).exists(), target
        assert file or anchor in headings, target
