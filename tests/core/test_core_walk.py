"""Random walks of a whole fleet: nothing raises, nothing is counted twice, no phase is emptied by suspicion, and once
faults end everything is eligible again (spec H2, S6; habit: invariants after every step)."""

import contextlib
import copy
import json
import random
from dataclasses import replace

import pytest

from narwhal.control.core.coverage import Candidate
from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference, RunCheck, RunTransfer
from narwhal.control.core.events import (
    CommandRefusedError,
    DrainCommand,
    EjectCommand,
    Input,
    PassEnded,
    ProbeCommand,
    ProcessIdentity,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    Reloaded,
    StageFailure,
    UndrainCommand,
    Woke,
)
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.control.core.records import Record
from narwhal.control.core.survey import Survey
from narwhal.reports import ProxyKey, RequestCounts
from narwhal.vocabulary import Outcome, Phase, Stage, Verdict
from tests.core.rig import NEUTRAL, PROCESS, SUCCESSES, Rig, decode, prefill

PROXIES = [ProxyKey(id=name, slot=0, boot=1) for name in ("a", "b", "c")]
ENGINES = (prefill("p1"), prefill("p2", pinned=True), decode("d1"), decode("d2", pinned=True), decode("d3"))
LEGS = [Outcome.STREAM_COMPLETE, Outcome.HANDOFF, Outcome.ERROR_EVENT, Outcome.HTTP_5XX, Outcome.REFUSED, Outcome.LOCAL]
NEWER = ProcessIdentity(version="0.33.0", started_at=PROCESS.started_at + 3600)
SEEN = [None, None, Outcome.REFUSED, Outcome.HTTP_5XX, Outcome.LOCAL, Outcome.READ_TIMEOUT, Outcome.CLIENT_ERROR]


class Walk:
    """One fleet, one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        quarantine_s = self.random.choice([0.0, 7.0])
        self.rig = Rig(*ENGINES, joined=False, failure_quarantine_s=quarantine_s, ramp_s=5.0, liveness_every=3)
        self.asked: list[RunCheck | ProbeHealth | ProbeInference | RunTransfer | CaptureIdentity] = []
        self.sequences = dict.fromkeys(PROXIES, 0)
        self.served = 0
        self.epoch = 1
        self.revisions = (0, 0)

    def take(self, effects: tuple[Effect, ...] | list[Effect]) -> None:
        self.asked += [e for e in effects if not isinstance(e, Record)]
        self.look()

    def look(self) -> None:
        """What holds after every step."""
        fleet, now = self.rig.fleet, self.rig.now
        revisions = (fleet.revision, fleet.counters_revision)
        assert revisions[0] >= self.revisions[0]
        assert revisions[1] >= self.revisions[1]
        self.revisions = revisions
        content = fleet.placement(now=now)
        self.looked_at_anew(content)
        for stored in (fleet.incarnations(), dict.fromkeys(content.engines, 1)):
            published = publishable(content, stored)
            self.covered(published.candidates, {p for e in published.engines.values() for p in e.phases})
        view = fleet.view(now=now)
        assert {e.id: e.phases for e in view.engines} == {e.id: e.phases for e in content.engines.values()}
        assert view.totals.served == self.served
        assert self.rig.fleet.next_due() is None or isinstance(self.rig.fleet.next_due(), float)

    def looked_at_anew(self, content: PlacementContent) -> None:
        """What is kept up with each change is what a look at everything comes to."""
        fleet, now = self.rig.fleet, self.rig.now
        anew = copy.copy(fleet._picture)
        anew._survey, anew._entries, anew._content = Survey(fleet._roster), {}, None
        fleet._roster.changes.anew = True
        assert anew.placement(now=now) == content
        assert anew.candidates(now) == content.candidates
        assert anew.boundary == fleet._picture.boundary

    @staticmethod
    def covered(candidates: tuple[Candidate, ...], served: set[Phase]) -> None:
        for phase in Phase:
            able = [c for c in candidates if not c.hard and (c.role is phase or not c.pinned)]
            assert (phase in served) == bool(able)

    # --- steps ----------------------------------------------------------------------------------------------------

    def report(self) -> None:
        proxy = self.random.choice(PROXIES)
        sequence = max(1, self.sequences[proxy] + self.random.choice([1, 1, 1, 0, -1]))
        runs = []
        for _ in range(self.random.randint(0, 5)):
            outcome = self.random.choice(LEGS if self.random.random() < 0.8 else list(Outcome))
            count = self.random.randint(1, 5) if outcome in SUCCESSES | NEUTRAL else 1
            engine, producer = (
                self.random.choice(["p1", "p2", "d1", "d2", "d3", "ghost"]),
                self.random.choice(["", "p1", "p2"]),
            )
            runs += [self.rig.run(engine, outcome, count=count, producer=producer)] * self.random.randint(1, 3)
        if sequence > self.sequences[proxy]:
            self.sequences[proxy] = sequence
            self.served += 2
        self.take(self.rig.batch(*runs, proxy=proxy, sequence=sequence, requests=RequestCounts(served=2)))

    def answer(self) -> None:
        if not self.asked:
            return
        asked = self.asked.pop(self.random.randrange(len(self.asked)))
        for _ in range(self.random.choice([1, 1, 1, 2])):  # now and then twice
            if isinstance(asked, RunCheck):
                self.take(self.rig.answer_check(asked, self.random.choice(list(Verdict))))
            elif isinstance(asked, ProbeHealth):
                self.take(self.rig.answer_health(asked, self.random.choice(SEEN)))
            elif isinstance(asked, CaptureIdentity):
                self.take(self.rig.answer_capture(asked, self.random.choice([None, PROCESS])))
            elif isinstance(asked, RunTransfer):
                ends = [None, Outcome.HANDOFF, Outcome.STREAM_COMPLETE, *LEGS]
                self.take(self.rig.answer_transfer(asked, self.random.choice(ends), self.random.choice(ends)))
            else:
                ends = [None, *LEGS]
                self.take(self.rig.answer_step(asked, self.random.choice(ends), self.random.choice(ends)))

    def lose(self) -> None:
        if self.asked:
            self.asked.pop(self.random.randrange(len(self.asked)))

    def time(self) -> None:
        self.rig.now += self.random.choice([0.1, 1.0, 5.0, 30.0])
        for stage in Stage:
            self.take(self.rig.tick(stage))
        if (due := self.rig.fleet.next_due()) is not None and self.rig.now >= due:
            self.take(self.rig.send(Woke()))
            assert (after := self.rig.fleet.next_due()) is None or after > self.rig.now

    def proxy(self) -> None:
        key = replace(self.random.choice(PROXIES), boot=self.random.choice([1, 1, 2]))
        hello = ProxyConnected(proxy=key, address="x", pid=1, highest_epoch=0)
        events: list[Input] = [hello, ProxyLost(proxy=key, reason="x"), ProxyLeft(proxy=key, reason="x")]
        self.take(self.rig.send(self.random.choice(events)))

    def acknowledge(self) -> None:
        """What is decided goes out, and somebody applies it."""
        self.take(self.rig.publish())
        key, legs = self.random.choice(PROXIES), self.random.choice([{}, {}, {"d1": 1}])
        ack = ProxyAcked(proxy=key, epoch=1, version=self.rig.version, resident=legs)
        self.take(self.rig.send(ack))

    def monitor(self) -> None:
        failed = StageFailure(stage=Stage.LIVENESS, error_class="OSError", message="")
        self.take(self.rig.send(PassEnded(failures=self.random.choice([(), (failed,)]))))

    def command(self) -> None:
        engine = self.random.choice(["p1", "d1", "d3", "ghost"])
        before = self.rig.saved()
        engines = tuple(self.random.sample([e.id for e in ENGINES], self.random.choice([1, 1, 2, 5])))
        restart = self.random.random() < 0.3
        commands: list[Input] = [
            EjectCommand(engine=engine, reason=""),
            ProbeCommand(engine=engine),
            DrainCommand(engines=engines, reason="x", deadline_s=20.0, restart=restart, wall=PROCESS.started_at),
            UndrainCommand(engines=engines),
            UndrainCommand(engines=tuple(e.id for e in self.rig.engines() if e.drain is not None)),
        ]
        try:
            self.take(self.rig.send(self.random.choice(commands)))
        except CommandRefusedError:
            assert self.rig.saved() == before

    def reload(self) -> None:
        engines = [e for e in ENGINES if e.id in ("p1", "d1") or self.random.random() < 0.8]
        if self.random.random() < 0.2:
            engines[0] = replace(engines[0], url=f"http://{self.random.random()}")
        self.take(self.rig.send(Reloaded(settings=self.rig.with_settings(engines=tuple(engines)))))

    def takeover(self) -> None:
        """Another process goes on from the document; what was asked by this one is answered to nobody."""
        self.epoch += 1
        wall = 1e9
        document = json.loads(json.dumps(to_document(self.rig.saved(), wall=wall, epoch=self.epoch, holder="x")))
        state = aged(from_document(document), wall=wall + self.random.choice([0.0, 3.0]))
        specs = {e.id: e for e in ENGINES}
        urls = {name: replace(specs[name], url=saved.url) for name, saved in state.engines.items()}
        settings = self.rig.with_settings(engines=tuple(urls.values()))
        self.rig.fleet = Fleet(settings, now=self.rig.now, epoch=self.epoch, saved=state)
        self.revisions = (0, 0)
        self.look()

    def run(self, steps: int) -> None:
        often = [self.report, self.answer, self.answer, self.answer, self.acknowledge, self.time]
        rarely = [self.lose, self.proxy, self.monitor, self.command, self.reload, self.takeover]
        for _ in range(steps):
            self.random.choice(often if self.random.random() < 0.85 else rarely)()

    def heal(self) -> None:
        """Every engine is healthy and restarted from now on, every question gets its answer, and nothing is drained."""
        self.rig.processes = dict.fromkeys((e.id for e in ENGINES), NEWER)
        self.asked = [a for a in self.asked if not isinstance(a, RunCheck)]
        self.rig.send(Reloaded(settings=self.rig.with_settings(engines=ENGINES)))
        for _ in range(900):
            self.take(self.rig.run_pass())
            while self.asked:
                asked = self.asked.pop(0)
                if isinstance(asked, RunCheck):
                    self.take(self.rig.answer_check(asked))
                elif isinstance(asked, ProbeHealth):
                    self.take(self.rig.answer_health(asked))
                elif isinstance(asked, RunTransfer):
                    self.take(self.rig.answer_transfer(asked))
                elif isinstance(asked, CaptureIdentity):
                    self.take(self.rig.answer_capture(asked))
                else:
                    self.take(self.rig.works(asked))
            self.take(self.rig.send(PassEnded()))
            self.acknowledge()
            with contextlib.suppress(CommandRefusedError):
                drained = tuple(e.id for e in self.rig.engines() if e.drain is not None)
                self.take(self.rig.send(UndrainCommand(engines=drained)))


@pytest.mark.rule("H2", "S6", "P2")
@pytest.mark.case("C11")
@pytest.mark.parametrize("seed", range(12))
def test_a_random_walk_keeps_the_invariants_and_ends_well(seed: int) -> None:
    walk = Walk(seed)
    walk.run(250)
    walk.heal()
    view = walk.rig.fleet.view(now=walk.rig.now)
    assert [e.id for e in view.engines if not e.eligible or e.holds or e.suspicion] == []
    assert view.not_ready == ""
    assert [e.weight for e in view.engines] == [1.0] * 5
