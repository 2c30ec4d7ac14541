"""What a situation is, the list of all, and the bodies they send (see bench.py for who runs them).

The situations themselves are in ordinary.py and trouble.py; importing those fills the list. Its order is the order of
recording: what spoils an engine comes last, so that few restarts are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.real_engines.bench import MODEL, Bench, Who
from scripts.real_engines.engines import Settings
from scripts.real_engines.rawhttp import Exchange

SENTENCE = "The narwhal dives under the ice and comes back with a fish. "
OPTIONS = {"include_usage": True}
USAGE = {"stream": True, "stream_options": OPTIONS}


Steps = list[dict[str, Any]]


def always(_: Steps) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Situation:
    """`spoils` names the engines that are unusable afterwards; `settings` how the engines must have been started.

    `seen` says whether the situation showed what it is about, where real engines do one thing or another by chance.
    """

    name: str
    what: str
    run: Callable[[Bench], None]
    spoils: frozenset[Who] = frozenset()
    settings: Settings = field(default_factory=Settings)
    seen: Callable[[Steps], bool] = always


ALL: list[Situation] = []


def situation(
    what: str,
    *,
    spoils: frozenset[Who] = frozenset(),
    settings: Settings | None = None,
    seen: Callable[[Steps], bool] = always,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Adds a function to the list under its own name, with dashes."""

    def add(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        name = run.__name__.replace("_", "-")
        started = settings or Settings()
        ALL.append(Situation(name=name, what=what, run=run, spoils=spoils, settings=started, seen=seen))
        return run

    return add


def text(about: str) -> str:
    """Several KV blocks long, and its own from the first block on for each `about`.

    A consumer that has seen a prompt before takes all but the last block from its prefix cache and then never asks the
    producer for them: most faults of a transfer would not show.
    """
    return f"{about}: {SENTENCE * 4}"


# The model's weights are random: without this an answer may end at any token, in one recording and not in the next.
COMMON = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def prompt(about: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, "prompt": text(about), **more}


def messages(about: str, **more: Any) -> dict[str, Any]:
    spoken = [{"role": "system", "content": text(about)}, {"role": "user", "content": "Where does it breathe?"}]
    return {**COMMON, "messages": spoken, **more}


def after_events(count: int) -> Callable[[Exchange], bool]:
    return lambda exchange: len(exchange.events()) >= count
