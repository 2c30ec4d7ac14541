"""Probes as effects: whom to ask, with which peers, and how long to wait (spec F6, V13). Pure.

Decides: which engines are healthy peers, and how much silence a transfer is allowed. It cannot see: why one asks.
"""

from collections.abc import Callable, Mapping

from narwhal.control.core.effects import ProbeHealth, ProbeInference, RunTransfer, Target
from narwhal.control.core.engine import Engine
from narwhal.control.core.probing import Step
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Phase

TRANSFER_TOKENS = 2  # of a gate's transfer: the first shows that the KV came over, the second that decoding goes on
ANSWER_MARGIN_S = 15.0  # beyond the time-outs that the shell keeps by itself; then the answer is taken for lost


class Asker:
    """Makes the effects of probes. The mapping is the fleet's own, so it always shows the engines as they are."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine]) -> None:
        self.settings = settings
        self._engines = engines
        # Pairs that this process saw exchange KV → their incarnations then: later transfers are fast (spec V13).
        self._met: dict[tuple[str, str], tuple[int, int]] = {}

    def health(self, engine: Engine, *, now: float, identity: bool = False) -> tuple[ProbeHealth, float]:
        """Ask for health; with the instant from which the answer is taken for lost."""
        timeout = self.settings.health_timeout_s
        effect = ProbeHealth(
            engine=engine.id,
            url=engine.spec.url,
            incarnation=engine.incarnation,
            number=engine.next_number(),
            timeout_s=timeout,
            identity=identity,
        )
        return effect, now + timeout + ANSWER_MARGIN_S

    def step(self, suspect: Engine, step: Step, *, now: float) -> tuple[ProbeInference, float]:
        """Ask for one step of an inference probe; with the instant from which the answer is taken for lost."""
        settings = self.settings
        consumer = self._engines[step.consumer]
        producer = None if step.producer is None else self._engines[step.producer]
        token = settings.first_token_timeout_s
        if producer is not None and self._met.get((producer.id, consumer.id)) != _incarnations(producer, consumer):
            token = settings.kv_first_pull_timeout_s
        silence = max(token, settings.health_timeout_s)
        effect = ProbeInference(
            engine=suspect.id,
            incarnation=suspect.incarnation,
            number=suspect.next_number(),
            model=settings.model,
            tokens=settings.probe_tokens,
            producer=None if producer is None else _target(producer),
            consumer=_target(consumer),
            silence_s=silence,
        )
        # Each token may take the whole silence, and so may the prefill leg and the terminal marker.
        return effect, now + silence * (settings.probe_tokens + 2) + ANSWER_MARGIN_S

    def transfer(self, account: Engine, producer: str, consumer: str, *, now: float) -> tuple[RunTransfer, float]:
        """Ask for a transfer of a gate. It may be the first of these two processes, whatever was seen of those before
        them; with the instant from which the answer is taken for lost."""
        settings = self.settings
        silence = max(settings.kv_first_pull_timeout_s, settings.first_token_timeout_s, settings.health_timeout_s)
        effect = RunTransfer(
            engine=account.id,
            incarnation=account.incarnation,
            number=account.next_number(),
            model=settings.model,
            tokens=TRANSFER_TOKENS,
            producer=_target(self._engines[producer]),
            consumer=_target(self._engines[consumer]),
            silence_s=silence,
        )
        return effect, now + silence * (TRANSFER_TOKENS + 2) + ANSWER_MARGIN_S

    def met(self, producer: str, consumer: str) -> None:
        """A transfer between them has worked."""
        if producer in self._engines and consumer in self._engines:
            pair = _incarnations(self._engines[producer], self._engines[consumer])
            self._met[producer, consumer] = pair

    def forget(self, engine: str) -> None:
        """The engine has left the fleet."""
        self._met = {pair: known for pair, known in self._met.items() if engine not in pair}

    def peers(self, suspect: Engine, phase: Phase, doubted: Callable[[Engine], bool], *, now: float) -> list[str]:
        """Healthy engines that may run `phase` for a probe of `suspect`: those of that role first, taking turns."""
        healthy = [
            e
            for e in self._engines.values()
            if e.id != suspect.id and e.able(phase) and e.free(now=now) and not doubted(e)
        ]
        turn = suspect.numbers % len(healthy) if healthy else 0
        turned = healthy[turn:] + healthy[:turn]
        return [e.id for e in sorted(turned, key=lambda e: e.role is not phase)]


def _incarnations(producer: Engine, consumer: Engine) -> tuple[int, int]:
    return producer.incarnation, consumer.incarnation


def _target(engine: Engine) -> Target:
    return Target(engine=engine.id, url=engine.spec.url, incarnation=engine.incarnation)
