"""How many tokens a prompt has, where an engine's `max_inflight_tokens` asks for it: known, asked of an engine, or
estimated.

A count that fails ends no request: the estimate stands, and the engine that failed is told of like that of any other
leg. Says nothing of counts that went well: they clear no evidence (spec F4).
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from narwhal.clock import Clock
from narwhal.connectors.base import ClientRequest, Connector, CountUnusable
from narwhal.connectors.said import said
from narwhal.proxy.attempt import Fault, LegEnd, StartLeg
from narwhal.proxy.choosing import Chooser
from narwhal.proxy.connection import Answer, Result
from narwhal.proxy.outcome import LegKind, of_status
from narwhal.proxy.witness import Leg
from narwhal.vocabulary import Outcome, Phase

_OK, _NOT_FOUND = 200, 404

Run = Callable[[Leg, StartLeg, bytes], Awaitable[Result]]


class Counted(NamedTuple):
    """What came of it. `failed`: a leg that is evidence against its engine, and how it ended."""

    tokens: int
    failed: tuple[Leg, LegEnd] | None = None


async def count(
    request: ClientRequest, step: StartLeg, *, ask: bool, connector: Connector, chooser: Chooser, clock: Clock, run: Run
) -> Counted:
    """The tokens of a request's prompt, at least one. `ask`: whether an engine may be asked, by `run`."""
    known = connector.known_tokens(request)
    if known is not None:
        return Counted(max(known, 1))
    estimate = max(connector.estimated_tokens(request), 1)
    entry = chooser.choose(Phase.PREFILL, step.avoid, 0) if ask else Fault.NO_ENGINES
    if isinstance(entry, Fault):
        return Counted(estimate)
    leg = Leg(entry, Phase.PREFILL, LegKind.COUNT, clock.monotonic())
    result = await run(leg, step, connector.count_body(request))
    if isinstance(result, LegEnd):
        return Counted(estimate, (leg, result))
    return _answered(leg, result, connector, estimate)


def _answered(leg: Leg, answer: Answer, connector: Connector, estimate: int) -> Counted:
    """Engines without a tokenizer answer 404, and those that judge the prompt another 4xx, which the prefill leg will
    get as well."""
    outcome = of_status(answer.status)
    if answer.status == _OK:
        with contextlib.suppress(CountUnusable):
            return Counted(max(connector.counted(answer.body), 1))
    elif outcome is not Outcome.CLIENT_ERROR and answer.status != _NOT_FOUND:
        detail = f"HTTP {answer.status} to a count: {said(answer.body)}"
        return Counted(estimate, (leg, LegEnd(outcome, answer.status, detail=detail)))
    return Counted(estimate)
