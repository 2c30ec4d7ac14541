"""Coverage-guided fuzzing of whatever reads bytes of others: searches for bytes for which a property of `tests/fuzz`
does not hold.

    python scripts/fuzz.py [TARGET ...] [--seconds 60] [--corpus DIR] [--list]

Needs atheris (`pip install atheris`), which is no dependency of the project. Each target runs in a process of its own,
bounded in time, memory, and time for one input. Says for each how many inputs were tried and how much of the code they
reached. Exits 1 when something was found; the bytes are then in a file, which is named: make a test of them.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONGEST_INPUT = 8192  # bytes; longer where a target begins with more
SLOWEST_S = 20  # for one input, on a busy machine
MOST_MIB = 1024
INSTRUMENTED = ["narwhal", "yaml"]
FOUND = re.compile(r"Test unit written to (\S+)")
REACHED = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")


def run_child(name: str, arguments: list[str]) -> None:
    """Searches in this process, and never returns."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=INSTRUMENTED):
        targets: Any = importlib.import_module("tests.fuzz.targets")
    mutator = importlib.import_module("tests.fuzz.shapes").mutator
    target = targets.TARGETS[name]
    targets.seeds(name)
    shaped = {"custom_mutator": mutator(target.words)} if target.json else {}
    atheris.Setup([name, *arguments], target.holds, **shaped)
    atheris.Fuzz()


def escaped(word: bytes) -> str:
    """A line of libFuzzer's dictionary."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n'


def search(name: str, seconds: int, corpus: Path, work: Path) -> bool:
    """One target. Returns whether nothing was found."""
    targets: Any = importlib.import_module("tests.fuzz.targets")
    begins, words, known = work / f"{name}.seeds", work / f"{name}.dict", corpus / name
    begins.mkdir()
    known.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(targets.seeds(name)):
        (begins / str(number)).write_bytes(data)
    # Long ones are for the tests: a dictionary's words are short.
    words.write_text("".join(escaped(word) for word in targets.TARGETS[name].words if len(word) <= 64))
    longest = max(LONGEST_INPUT, *(2 * len(data) for data in targets.seeds(name)))
    options = {
        "max_total_time": seconds,
        "max_len": longest,
        "timeout": SLOWEST_S,
        "rss_limit_mb": MOST_MIB,
        "artifact_prefix": f"{known}-",
        **({"dict": words} if words.stat().st_size else {}),
    }
    given = [f"-{key}={value}" for key, value in options.items()]
    command = [sys.executable, __file__, "--child", name, "--", *given, str(known), str(begins)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    reached = REACHED.findall(run.stdout)
    cov, features, kept = reached[-1] if reached else ("?", "?", "?")
    tried = re.findall(r"^#(\d+)", run.stdout, re.MULTILINE)
    print(
        f"{name:<18} {tried[-1] if tried else '0':>9} inputs, {cov:>5} edges, {features:>6} features, {kept:>5} kept",
        flush=True,
    )
    found = FOUND.search(run.stdout)
    if run.returncode == 0 and found is None:
        return True
    print(run.stdout[max(0, run.stdout.find(" === Uncaught")) :][-4000:])
    print(f"{name}: does not hold for the bytes in {found.group(1) if found else '(no file was written)'}", flush=True)
    return False


def main() -> int:
    """Exit codes: 0 nothing was found, 1 something was, 2 usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all of them, unless some are named")
    parser.add_argument(
        "--seconds",
        type=int,
        default=60,
        help="how long each target is searched (60), not all of them together; loading our code for it, and ending "
        "what is being tried, takes up to half a minute more for each on a busy machine",
    )
    parser.add_argument("--corpus", type=Path, help="keep what reached new code here, and begin with what is there")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.child:
        run_child(options.child, options.targets)
    known: Any = importlib.import_module("tests.fuzz.targets").TARGETS
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in options.targets if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as made:
        # Findings outlive the run wherever they are kept.
        corpus = (options.corpus or Path(tempfile.mkdtemp(prefix="narwhal-fuzz-"))).resolve()
        held = [search(name, options.seconds, corpus, Path(made)) for name in options.targets or known]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
