"""The import rules of CONTRIBUTING.md, checked over the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "narwhal"

PURE = [
    PACKAGE / "vocabulary.py",
    PACKAGE / "placement.py",
    PACKAGE / "reports.py",
    *sorted((PACKAGE / "control" / "core").glob("*.py")),
    PACKAGE / "proxy" / "attempt.py",
    PACKAGE / "proxy" / "outcome.py",
    PACKAGE / "proxy" / "admission.py",
]
PURE_MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in PURE}
PURE_STDLIB = {"collections", "dataclasses", "enum", "functools", "itertools", "json", "math", "typing"}
SEES_PROTOBUF = {
    "narwhal/wire.py",
    "narwhal/control/service.py",
    "narwhal/control/drains.py",
    "narwhal/control/fleet_messages.py",
    "narwhal/control/fleet_service.py",
    "narwhal/control/publisher.py",
}


def sources() -> list[Path]:
    """Every module of the package that people write."""
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "_pb" not in p.parts]


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at the top) of every import in a file; `from a import b` gives both a and a.b."""
    tree = ast.parse(path.read_text(), str(path))
    top = {id(node) for node in tree.body}
    for block in tree.body:
        # `if TYPE_CHECKING:` and `try:` at module level are still the top.
        if isinstance(block, ast.If | ast.Try):
            top |= {id(node) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno, id(node) in top
            for name in node.names:
                yield f"{node.module}.{name.name}", node.lineno, id(node) in top


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PURE, ids=named)
def test_pure_modules_import_a_short_list(path: Path) -> None:
    for module, line, _ in imports(path):
        allowed = module.split(".")[0] in PURE_STDLIB or any(
            module == pure or module.startswith(f"{pure}.") for pure in PURE_MODULES
        )
        assert allowed, f"{path}:{line}: a pure module imports {module}"


@pytest.mark.parametrize("path", PURE, ids=named)
def test_pure_modules_have_no_coroutines(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{path}:{node.lineno}: async in a pure module"


def test_control_and_proxy_do_not_know_each_other() -> None:
    for path in sources():
        part = path.relative_to(PACKAGE).parts[0]
        for module, line, _ in imports(path):
            if part in ("control", "proxy"):
                other = "proxy" if part == "control" else "control"
                assert not module.startswith(f"narwhal.{other}"), f"{path}:{line}: {part} imports {module}"


def test_only_who_runs_a_core_imports_the_fleet() -> None:
    may = {PACKAGE / "control" / name for name in ("loop.py", "leader.py", "replay.py", "what_if.py")}
    for path in sources():
        for module, line, _ in imports(path):
            if module == "narwhal.control.core.fleet.Fleet":
                assert path in may, f"{path}:{line}: imports Fleet"


def test_generated_code_is_seen_by_wire_and_servicers_only() -> None:
    # Clients of a service need its stub; they get it beside the values in these modules.
    clients = {
        "narwhal/cli/client.py",
        "narwhal/cli/messages.py",
        "narwhal/control/peer.py",
        "narwhal/proxy/link.py",
        "narwhal/proxy/reporter.py",
    }
    for path in sources():
        for module, line, _ in imports(path):
            if module.startswith("narwhal._pb"):
                assert named(path) in SEES_PROTOBUF | clients, f"{path}:{line}: imports {module}"


def test_only_the_etcd_store_knows_its_client() -> None:
    may = set((PACKAGE / "control" / "store").glob("etcd*.py"))
    for path in sources():
        for module, line, _ in imports(path):
            if module.split(".")[0] == "etcd3":
                assert path in may, f"{path}:{line}: imports {module}"


def test_nothing_but_the_clock_imports_time() -> None:
    for path in sources():
        if path == PACKAGE / "clock.py" or path.is_relative_to(PACKAGE / "sim"):
            continue
        for module, line, _ in imports(path):
            assert module.split(".")[0] != "time", f"{path}:{line}: imports time"


def test_imports_are_absolute_and_at_the_top() -> None:
    lazily = {PACKAGE / "cli" / "main.py"}  # narwhalctl loads a command when it is called: start-up time
    for path in sources():
        for module, line, top in imports(path):
            assert top or path in lazily, f"{path}:{line}: import of {module} inside a function"
