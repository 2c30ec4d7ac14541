#!/usr/bin/env python3
"""Writes the table of keys in docs/configuration.md from the fleet file's model; with `--check` only compares it."""

import sys
from pathlib import Path

from narwhal.config.schema import rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: made by scripts/gen_config_docs.py -->\n", "<!-- end of keys -->\n"


def table() -> str:
    """The keys as one Markdown table."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [f"| `{row.path}` | {row.default} | {row.meaning} |" for row in rows()]
    return "\n".join(lines) + "\n"


def current(page: str) -> str:
    """`page` with the table as it should be. Raises ValueError when it lacks the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: the marks around the table of keys are missing")
    return before + begin + "\n" + table() + "\n" + end + after


def main() -> int:
    """Writes or checks; returns the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = current(page)
    if "--check" in sys.argv[1:]:
        if page != wanted:
            print(f"{PAGE}: the table of keys is not current; run scripts/gen_config_docs.py", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
