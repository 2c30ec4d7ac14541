"""Generates narwhal/_pb from protos/. `--check` writes nothing and fails when the committed code differs."""

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos" / "narwhal" / "v1").glob("*.proto"))
TARGET = ROOT / "narwhal" / "_pb"


def generate(out: Path) -> None:
    """Writes the modules and stubs of every proto into `out`, with imports that work below narwhal._pb."""
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"-I{ROOT / 'protos'}",
                f"-I{files('grpc_tools') / '_proto'}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--grpc_python_out={scratch}",
                f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
                f"--mypy_grpc_out=quiet:{scratch}",
                *(str(p) for p in PROTOS),
            ]
        )
        if status:
            sys.exit(f"protoc failed with {status}")
        for path in sorted(Path(scratch, "narwhal", "v1").iterdir()):
            text = path.read_text()
            text = re.sub(r"from narwhal\.v1 import", "from narwhal._pb import", text)
            text = re.sub(r"import narwhal\.v1\.(\w+) as", r"import narwhal._pb.\1 as", text)
            text = re.sub(r"import narwhal\.v1\.(\w+)$", r"import narwhal._pb.\1", text, flags=re.M)
            text = re.sub(r"\bnarwhal\.v1\.(\w+_pb2)\.", r"narwhal._pb.\1.", text)
            (out / path.name).write_text(text)
    (out / "__init__.py").write_text('"""Generated from protos/ by scripts/gen_protos.py; do not edit."""\n')


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        generate(out)
        names = {p.name for p in out.iterdir()}
        have = {p.name for p in TARGET.glob("*.py*") if p.is_file()}
        if check:
            _, differ, missing = filecmp.cmpfiles(out, TARGET, sorted(names), shallow=False)
            stale = sorted({*differ, *missing, *(have - names)})
            if stale:
                sys.exit(f"narwhal/_pb is not what protos/ generate: {', '.join(stale)}; run make protos")
            return
        TARGET.mkdir(exist_ok=True)
        for name in have - names:
            (TARGET / name).unlink()
        for name in sorted(names):
            shutil.copyfile(out / name, TARGET / name)


if __name__ == "__main__":
    main()
