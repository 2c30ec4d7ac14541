"""docs/configuration.md says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

from narwhal.config import parse_fleet
from narwhal.config.schema import rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_table_of_keys_is_current(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "gen_config_docs.py").read_text(encoding="utf-8")
    for folder in ("scripts", "docs"):
        (tmp_path / folder).mkdir()
    copy = tmp_path / "scripts" / "gen_config_docs.py"
    page = tmp_path / "docs" / "configuration.md"
    copy.write_text(script, encoding="utf-8")

    def check(text: str) -> int:
        page.write_text(text, encoding="utf-8")
        return subprocess.run(
            [sys.executable, copy, "--check"], timeout=60, check=False, capture_output=True
        ).returncode

    assert check(PAGE) == 0
    assert check(PAGE.replace("| `slo.ttft_s` | `2` |", "| `slo.ttft_s` | `3` |")) == 1
    subprocess.run([sys.executable, copy], timeout=60, check=True)
    assert page.read_text(encoding="utf-8") == PAGE


def test_the_smallest_file_loads() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 1
    assert parse_fleet(blocks[0], {}).engine_set() == {"prefill-0", "decode-0"}


def test_every_key_that_the_page_names_exists() -> None:
    keys = {row.path for row in rows()}
    sections = {key.rpartition(".")[0] for key in keys}
    prose = PAGE.partition("## What must fit together")[2]
    named = set(re.findall(r"`([a-z_]+(?:\[\])?\.[a-z_.]+)`", prose))
    assert len(named) > 20
    assert named - keys - sections == set()
