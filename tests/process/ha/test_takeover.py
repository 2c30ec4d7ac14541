"""The active control process is killed, ended, stopped, blocked or degraded, under load: another one goes on from what
was stored, and the one that was away changes nothing any more."""

import asyncio
import json
import signal
import time

import pytest
from openai import AsyncOpenAI, OpenAIError

from tests.metronome import Metronome
from tests.process.faults import told
from tests.process.ha.ensemble import BLOCK_S, NAMES, TTL_S, Ensemble, boottime, passed, state
from tests.process.ha.reigns import written
from tests.process.harness import MODEL, Program, ctl, until


@pytest.fixture(scope="module", autouse=True)
def _wounded(running: Ensemble) -> None:
    asyncio.run(wound(running))


async def wound(fleet: Ensemble) -> None:
    """A fleet with something to remember: an engine that is ejected, one that is drained, a streak of one."""
    await fleet.restore()
    name, _ = await fleet.settled()
    stage, control = fleet.stage, fleet.at[name]
    await fleet.healed()
    for engine, fault in (("d2", {"mode": "status", "status": 429, "count": 1}), ("d3", {"mode": "health-status"})):
        await stage.post(f"http://127.0.0.1:{stage.ports[engine]}/sim/fault", fault)
    for words in (("eject", "d3"), ("drain", "p3", "--wait", "--reason", "new driver")):
        code, _, err = await ctl(control, *words)
        assert code == 0, err
    base = f"http://{fleet.proxies[0].at['http']}/v1"
    async with AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:

        async def counted() -> bool:
            try:
                await client.completions.create(model=MODEL, prompt="x", max_tokens=2)
            except OpenAIError:
                return True
            fleet.served += 1
            return False

        await until(counted, "one failure")

    async def stored() -> bool:
        return bool(state(await fleet.document(await fleet.active()))["d2"]["streaks"])

    await until(stored, "it is remembered")


def remembered(before: dict[str, object], after: dict[str, object]) -> None:
    """What was remembered is what there was to remember, and is the same."""
    assert after == before
    d2, d3, p3 = (after[name] for name in ("d2", "d3", "p3"))
    assert isinstance(d2, dict)
    assert isinstance(d3, dict)
    assert isinstance(p3, dict)
    assert d2["streaks"] == {"overload": 1}
    assert [kind for kind, _ in d3["holds"]] == ["ejected"]
    assert (p3["holds"][0][0], p3["drain"]["reason"], p3["drain"]["settled"]) == ("drain", "new driver", True)


@pytest.mark.rule("S5", "S6", "S7", "P5", "R5")
@pytest.mark.case("I16")
@pytest.mark.parametrize(("number", "bound_s"), [(signal.SIGKILL, TTL_S + 1.0), (signal.SIGTERM, 1.0)])
async def test_case_I16_the_active_is_killed_or_ended_and_no_client_notices(
    fleet: Ensemble, number: signal.Signals, bound_s: float
) -> None:
    # Which of the processes that take part the machine kept waiting cannot be told: one of three times is in time.
    for _ in range(3):
        await fleet.restore()
        took_s = await ended(fleet, number)
        if took_s < bound_s:
            return
    pytest.fail(f"took {took_s:.2f} s, again")


async def ended(fleet: Ensemble, number: signal.Signals) -> float:
    """The active is, under load, and another one leads. How long it took until every proxy followed that one, seconds
    less what the machine withheld."""
    name, epoch = await fleet.settled()
    heir = fleet.other(name)
    before = state(await fleet.document(name))
    async with fleet.load() as seen:
        with Metronome() as metronome:
            began = time.time()
            code = await fleet.end(name, number)
            times = await fleet.followed(epoch + 1)
        took_s = max(times) - began
        await seen.more(12)
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    print(f"{number.name}: every proxy follows the next epoch after {took_s:.2f} s, stalls {metronome.total_s:.2f} s")
    assert seen.errors == []
    assert await fleet.active() == heir
    await fleet.counted()
    remembered(before, state(await fleet.document(heir)))
    return took_s - metronome.total_s


@pytest.mark.rule("S4", "S5", "P5")
@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.case("I2")),
                                 pytest.param("blocked", marks=pytest.mark.case("I7"))])  # fmt: skip
async def test_an_active_that_was_stopped_or_blocked_for_two_ttls_is_believed_by_nobody(
    fleet: Ensemble, how: str
) -> None:
    name, epoch = await fleet.settled()
    heir = fleet.other(name)
    program = fleet.control[name]
    before = state(await fleet.document(name))
    fenced = len(told(program, "control_fenced"))
    async with fleet.load() as seen:
        with Metronome() as metronome:
            began = await gone(program, how)
            await fleet.followed(epoch + 1)
            took_s = boottime() - began
            await passed(2 * TTL_S - took_s)
            if how == "stopped":
                program.signal(signal.SIGCONT)
            back = max(boottime(), began + BLOCK_S if how == "blocked" else 0.0)
            await until(lambda: len(told(program, "control_fenced")) > fenced, program.tail)
        again, newest = await fleet.settled()
        print(f"{how}: taken over after {took_s:.2f} s, in place again {boottime() - back:.2f} s after it went on")
        await seen.more(6)
    assert (again, newest) == (heir, epoch + 1), "it stands by, by itself, and nobody else had to lead"
    assert program.process.poll() is None
    last = told(program, "control_fenced")[-1]
    # A loop without life is renewed for one TTL more; a process that is stopped renews nothing.
    assert float(last["valid_until"]) < began + (TTL_S if how == "stopped" else 2 * TTL_S)
    assert last["boottime"] - back < 2.0 + metronome.total_s, "before it does anything"
    # Nothing of the old epoch was written once the new one was.
    epochs = [document for _, document, _ in await asyncio.to_thread(written, fleet.etcd)]
    assert epochs == sorted(epochs)
    assert seen.errors == []
    await fleet.counted()
    remembered(before, state(await fleet.document(heir)))


async def gone(program: Program, how: str) -> float:
    """It is stopped or blocked; since when, as boot time."""
    before = len(program.events("blocked"))
    program.signal(signal.SIGSTOP if how == "stopped" else signal.SIGUSR1)
    if how == "stopped":
        return boottime()
    found = await until(lambda: program.events("blocked")[before:], "its loop is blocked")
    return float(found[0]["boottime"])


@pytest.mark.rule("S7")
async def test_an_operator_switches_over_and_the_history_says_who_led(fleet: Ensemble) -> None:
    name, epoch = await fleet.settled()
    heir, everybody = fleet.other(name), ",".join(fleet.at.values())
    before = state(await fleet.document(name))
    async with fleet.load() as seen:
        code, out, err = await ctl(everybody, "switchover", "--dry-run")
        assert code == 0, err
        assert f"{heir} at {fleet.at[heir]} leads instead of epoch {epoch}\n" in out
        assert await fleet.active() == name
        code, out, err = await ctl(everybody, "switchover", "--to", heir)
        assert code == 0, err
        assert out.startswith(f"{heir} at {fleet.at[heir]} leads under epoch {epoch + 1}, epoch {epoch} is over (took ")
        await fleet.followed(epoch + 1)
        await seen.more(6)
    assert seen.errors == []
    remembered(before, state(await fleet.document(heir)))
    code, out, err = await ctl(everybody, "history", "-o", "json")
    assert code == 0, err
    last = json.loads(out)["epochs"][-2:]
    assert [(e["epoch"], e["holder"], e["ending"]) for e in last] == [
        (epoch, name, "switched"),
        (epoch + 1, heir, "lasts"),
    ]


@pytest.mark.rule("M5", "M6", "M8")
async def test_a_degraded_active_yields_once_and_one_without_a_standby_recovers_by_itself(fleet: Ensemble) -> None:
    name, epoch = await fleet.settled()
    heir = fleet.other(name)
    refused = len(told(fleet.control[heir], "yield_refused"))
    for each in NAMES:
        fleet.turn(each)  # both fail, for one cause
    await fleet.followed(epoch + 1)
    assert [(e.epoch, e.holder, e.ending) for e in await fleet.history(heir)][-2:] == [
        (epoch, name, "yielded"),
        (epoch + 1, heir, "lasts"),
    ]
    news = await until(lambda: told(fleet.control[heir], "yield_refused")[refused:], fleet.tails)
    words = news[0]["event"]
    assert words.startswith(f"does not yield to {name}: the lease was yielded ")
    await fleet.end(name, signal.SIGKILL)
    # Alone it stays, for longer than a standby would have waited, and says why it takes nothing on.
    await passed(1.5)
    readiness = await until(lambda: fleet.readiness(heir), "it answers")
    assert (readiness["reason"], readiness["epoch"]) == ("monitoring degraded: liveness RuntimeError", epoch + 1)
    fleet.turn(heir)
    await fleet.stage.ready(fleet.control[heir].at["http"])
    async with fleet.load() as seen:
        await seen.more(6)
    assert seen.errors == []
    assert (await until(lambda: fleet.readiness(heir), "it answers"))["epoch"] == epoch + 1
