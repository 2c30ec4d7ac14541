"""Checks and health probes of engines over HTTP: every answer of an engine, and every cause of our own."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from narwhal.clock import RealClock
from narwhal.control.core.effects import ProbeHealth, RunCheck
from narwhal.control.core.events import Answer, CheckAnswered, CheckResult, HealthAnswered, ProcessIdentity
from narwhal.control.engine_client import ProbeSettings
from narwhal.control.probes import Probes
from narwhal.vocabulary import Check, Outcome, Verdict
from tests.contract.control_kit import BOUND_S, Engines, until
from tests.metronome import Metronome

SETTINGS = ProbeSettings(connections=2, connect_timeout_s=0.5, pool_timeout_s=0.2, keepalive_s=4.0, api_key="secret")


class Asked:
    """Probes whose answers are kept."""

    def __init__(self, settings: ProbeSettings = SETTINGS) -> None:
        self.answers: list[Answer] = []
        self.probes = Probes(settings, clock=RealClock(), post=self.answers.append)

    async def check(self, url: str, check: Check, *, timeout_s: float = 0.3) -> CheckResult:
        before = len(self.answers)
        self.probes.start(
            RunCheck(engine="e", url=url, incarnation=3, number=7, check=check, model="tiny", timeout_s=timeout_s)
        )
        await until(lambda: len(self.answers) > before)
        answer = self.answers[-1]
        assert isinstance(answer, CheckAnswered)
        assert (answer.engine, answer.incarnation, answer.number, answer.check) == ("e", 3, 7, check)
        return answer.result

    async def health(self, url: str, *, identity: bool = False, timeout_s: float = 0.3) -> HealthAnswered:
        before = len(self.answers)
        self.probes.start(
            ProbeHealth(engine="e", url=url, incarnation=3, number=7, timeout_s=timeout_s, identity=identity)
        )
        await until(lambda: len(self.answers) > before)
        answer = self.answers[-1]
        assert isinstance(answer, HealthAnswered)
        assert (answer.engine, answer.incarnation, answer.number) == ("e", 3, 7)
        return answer


@pytest_asyncio.fixture
async def asked() -> AsyncIterator[Asked]:
    made = Asked()
    yield made
    await made.probes.close()


@asynccontextmanager
async def raw(answer: bytes | None) -> AsyncIterator[str]:
    """A server that sends these bytes to every connection and closes it; None: only closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R1")
async def test_a_healthy_engine_that_serves_the_model_passes(asked: Asked, served: Engines) -> None:
    health = await asked.check(f"{served.base}/e", Check.HEALTH)
    assert (health.verdict, health.detail) == (Verdict.PASS, "GET /health answered 200")
    assert health.latency_s > 0
    model = await asked.check(f"{served.base}/e/", Check.MODEL)
    assert (model.verdict, model.detail) == (Verdict.PASS, "serves tiny")
    # The first check says too of which process the gate is tried.
    assert health.identity == ProcessIdentity(version="1", started_at=1000.0)
    assert served.asked == [("e", "/health"), ("e", "/version"), ("e", "/metrics"), ("e", "/v1/models")]
    assert served.authorization == ["Bearer secret"] * 4


@pytest.mark.case("C8")
@pytest.mark.parametrize("status", [404, 500, 503, 429, 301])
async def test_any_other_status_fails_the_health_check_and_is_named(status: int, asked: Asked, served: Engines) -> None:
    served.status["e"] = status
    result = await asked.check(f"{served.base}/e", Check.HEALTH)
    assert (result.verdict, result.detail) == (Verdict.FAIL, f"GET /health answered {status}")


async def test_another_model_fails_the_model_check_and_what_is_served_is_named(asked: Asked, served: Engines) -> None:
    served.models["e"] = ["b", "a"]
    result = await asked.check(f"{served.base}/e", Check.MODEL)
    assert (result.verdict, result.detail) == (Verdict.FAIL, "serves a, b, not tiny")
    served.models["e"] = []
    assert (await asked.check(f"{served.base}/e", Check.MODEL)).detail == "serves no model, not tiny"


NO_MODELS = [
    *(b"", b"[]", b"{", b'{"data": 3}', b'{"data": [{}]}', b"\xff", b'{"data": [{"id": 3}]}'),
    b'{"data": [{"id": %b}]}' % (b"[" * 1000 + b"]" * 1000),  # too deep to be made text of
]


async def test_what_a_check_says_is_bounded_however_much_the_engine_says(asked: Asked, served: Engines) -> None:
    served.models["e"] = [f"model-{number:06}" for number in range(10_000)]
    result = await asked.check(f"{served.base}/e", Check.MODEL)
    assert result.verdict is Verdict.FAIL
    assert result.detail.startswith("serves model-000000, model-000001, ")
    assert len(result.detail) == 1000


@pytest.mark.parametrize("body", NO_MODELS, ids=range(len(NO_MODELS)))
async def test_a_list_of_models_that_is_none_fails(body: bytes, asked: Asked) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with raw(head + body) as url:
        result = await asked.check(url, Check.MODEL)
    assert result.verdict is Verdict.FAIL
    assert result.detail == "GET /v1/models answered something else than a list of models"


# --- what a missing answer means --------------------------------------------------------------------------------------


async def silent(asked: Asked, url: str, outcome: Outcome, words: str) -> None:
    """A health probe and a health check of this engine say so."""
    answer = await asked.health(url)
    assert (answer.outcome, answer.detail, answer.status) == (outcome, f"GET /health: {words}", 0)
    expected = Verdict.INCONCLUSIVE if outcome is Outcome.LOCAL else Verdict.FAIL
    assert (await asked.check(url, Check.HEALTH)).verdict is expected


async def test_a_refused_connection(asked: Asked) -> None:
    await silent(asked, closed_port(), Outcome.REFUSED, "connection refused")


async def test_an_engine_that_accepts_and_does_not_answer(asked: Asked, served: Engines) -> None:
    served.hang.add("e")
    await silent(asked, f"{served.base}/e", Outcome.READ_TIMEOUT, "no answer within 0.3 s")


@pytest.mark.parametrize(
    ("answer", "outcome", "words"),
    [
        (None, Outcome.RESET, "connection closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", Outcome.ANSWER_CUT, "the answer was cut short"),
    ],
)
async def test_an_answer_that_never_came_or_was_cut(
    answer: bytes | None, outcome: Outcome, words: str, asked: Asked
) -> None:
    async with raw(answer) as url:
        await silent(asked, url, outcome, words)


async def test_an_answer_that_is_not_http(asked: Asked) -> None:
    async with raw(b"\x16\x03\x01 this is something else\r\n\r\n") as url:
        answer = await asked.health(url)
    assert answer.outcome is Outcome.RESET
    assert "not an HTTP answer" in answer.detail


async def test_tls_that_fails(asked: Asked, served: Engines) -> None:
    await silent(asked, served.base.replace("http:", "https:"), Outcome.TLS_FAILED, "TLS failed")


@pytest.mark.rule("F5", "L3")
@pytest.mark.parametrize(
    ("code", "outcome", "words"),
    [
        (socket.EAI_NONAME, Outcome.UNREACHABLE, "the name does not resolve"),
        (socket.EAI_AGAIN, Outcome.LOCAL, "our resolver does not answer"),
    ],
)
async def test_a_name_that_does_not_resolve_and_a_resolver_that_is_broken_are_two_things(
    code: int, outcome: Outcome, words: str, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(code, "as told")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    await silent(asked, "http://engine.invalid:80", outcome, words)


@pytest.mark.rule("F5", "L3")
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_a_cause_of_our_own_is_inconclusive(
    code: int, asked: Asked, served: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, "as told")

    monkeypatch.setattr(socket, "socket", no_socket)
    answer = await asked.health(f"{served.base}/e")
    monkeypatch.undo()
    assert answer.outcome is Outcome.LOCAL
    assert errno.errorcode[code] in answer.detail


@pytest.mark.rule("V1", "L3")
async def test_without_a_control_connection_in_time_a_probe_is_inconclusive(asked: Asked, served: Engines) -> None:
    served.hang.add("slow")
    for _ in range(SETTINGS.connections):
        asked.probes.start(
            ProbeHealth(engine="slow", url=f"{served.base}/slow", incarnation=1, number=1, timeout_s=5.0)
        )
    await until(lambda: len(served.asked) == SETTINGS.connections)
    await silent(asked, f"{served.base}/e", Outcome.LOCAL, "no control connection within 0.2 s")
    assert ("e", "/health") not in served.asked


# --- health probes ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("F3")
@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, None),
        (204, Outcome.CLIENT_ERROR),
        (404, Outcome.CLIENT_ERROR),
        (408, Outcome.HTTP_408),
        (429, Outcome.HTTP_429),
        (500, Outcome.HTTP_5XX),
        (503, Outcome.HTTP_5XX),
    ],
)
async def test_what_a_status_of_health_comes_to(
    status: int, outcome: Outcome | None, asked: Asked, served: Engines
) -> None:
    served.status["e"] = status
    answer = await asked.health(f"{served.base}/e")
    assert (answer.outcome, answer.status, answer.detail) == (outcome, status, f"GET /health answered {status}")
    assert answer.latency_s > 0
    assert answer.identity is None


@pytest.mark.rule("L1")
async def test_the_process_identity_is_version_and_start_of_the_process(asked: Asked) -> None:
    answers = {
        b"/health": b"",
        b"/version": b'{"version": "0.32.0"}',
        b"/metrics": b"# HELP process_start_time_seconds x\n# TYPE process_start_time_seconds gauge\n"
        b"process_start_time_seconds 1.7e9\nother 1\n",
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        body = answers[path]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    answer = await asked.health(url, identity=True)
    assert answer.identity == ProcessIdentity(version="0.32.0", started_at=1.7e9)
    for path, body in (
        (b"/metrics", b"nothing of the kind"),
        # No instants: they equal nothing, and a state handoff that held one could not be read again.
        (b"/metrics", b"process_start_time_seconds nan\n"),
        (b"/metrics", b"process_start_time_seconds -Inf\n"),
        (b"/version", b"[]"),
        (b"/version", b'{"version": {"a": 1}}'),
        (b"/version", b'{"version": "%b"}' % (b"x" * 201)),  # it would be part of every state handoff
    ):
        kept, answers[path] = answers[path], body
        answer = await asked.health(url, identity=True)
        assert (answer.outcome, answer.identity) == (None, None)
        answers[path] = kept
    server.close()
    await server.wait_closed()


# --- running them -----------------------------------------------------------------------------------------------------


async def test_a_hundred_probes_of_hung_engines_hold_up_nothing_and_leave_nothing(served: Engines) -> None:
    asked = Asked(ProbeSettings(connections=100, connect_timeout_s=1.0, pool_timeout_s=1.0, keepalive_s=4.0))
    served.hang.add("slow")
    for number in range(100):
        asked.probes.start(
            ProbeHealth(engine="slow", url=f"{served.base}/slow", incarnation=1, number=number, timeout_s=60.0)
        )
    assert asked.probes.running == 100
    with Metronome() as metronome:
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asked.probes.close(), BOUND_S)
    assert metronome.ran_s < 1.0
    assert asked.probes.running == 0
    assert asked.answers == [], "a probe that is cancelled says nothing"


@pytest.mark.case("B4")
async def test_the_probes_of_an_engine_that_is_removed_end(asked: Asked, served: Engines) -> None:
    served.hang |= {"gone", "kept"}
    for engine in ("gone", "kept"):
        asked.probes.start(
            ProbeHealth(engine=engine, url=f"{served.base}/{engine}", incarnation=1, number=1, timeout_s=0.5)
        )
    asked.probes.configure(SETTINGS, frozenset({"kept"}))
    await until(lambda: asked.answers)
    assert [a.engine for a in asked.answers] == ["kept"]
    await until(lambda: asked.probes.running == 0)


async def test_other_settings_count_from_the_next_probe_on_and_end_none(asked: Asked, served: Engines) -> None:
    served.hang.add("slow")
    asked.probes.start(ProbeHealth(engine="slow", url=f"{served.base}/slow", incarnation=1, number=1, timeout_s=0.4))
    await until(lambda: served.asked)
    new = ProbeSettings(connections=1, connect_timeout_s=1.0, pool_timeout_s=1.0, keepalive_s=4.0, api_key="other")
    asked.probes.configure(new, frozenset({"slow", "e"}))
    assert (await asked.health(f"{served.base}/e")).outcome is None
    assert served.authorization == ["Bearer secret", "Bearer other"]
    await until(lambda: len(asked.answers) == 2)
    last = asked.answers[-1]
    assert isinstance(last, HealthAnswered)
    assert last.outcome is Outcome.READ_TIMEOUT
