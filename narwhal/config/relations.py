"""What the fields of a fleet file demand of each other.

Each relation is a function over the whole configuration that yields what is wrong: the field to change, the other
fields that it depends on, and one sentence that names both. `RELATIONS` is the whole list. Each value is valid by
itself when a relation looks at it. `ADVICE` is of the same kind and refuses no file: there may be a reason to do
otherwise.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narwhal.config.problems import shown
from narwhal.vocabulary import Phase

if TYPE_CHECKING:
    from narwhal.config.fleet import FleetConfig


SMALLEST_JOURNAL = 1024 * 1024  # bytes
# Monitor intervals between the word that an engine is silent and its hold, with room to spare.
HOLD_INTERVALS = 3


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """`path` cannot stay as it is beside `others`, for the reason in `sentence`."""

    path: str
    others: tuple[str, ...]
    sentence: str

    def involves(self, paths: Iterable[str]) -> bool:
        """Whether one of `paths` is a field that this is about, or holds one, or is part of one of `others`."""
        return any(
            _within(self.path, path) or any(_within(other, path) or _within(path, other) for other in self.others)
            for path in paths
        )


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _engines_differ(fleet: "FleetConfig") -> Iterator[Conflict]:
    """An id or an address that appears twice would give two engines one record."""
    for field in ("id", "url"):
        first: dict[str, int] = {}
        for index, engine in enumerate(fleet.engines):
            value = getattr(engine, field)
            earlier = first.setdefault(value, index)
            if earlier != index:
                other = f"engines[{earlier}].{field}"
                yield Conflict(
                    path=f"engines[{index}].{field}",
                    others=(other,),
                    sentence=f"must differ from {other}, both are {shown(value)}",
                )


def _phases_covered(fleet: "FleetConfig") -> Iterator[Conflict]:
    """Floors out of reach. A single engine that is not pinned serves both phases, so floors of 1 are fine with it."""
    floors = {Phase.PREFILL: fleet.controller.min_prefill, Phase.DECODE: fleet.controller.min_decode}
    roles = tuple(f"engines[{index}].{key}" for index in range(len(fleet.engines)) for key in ("role", "pinned"))
    reachable = True
    for phase, floor in floors.items():
        able = sum(not engine.pinned or engine.role is phase for engine in fleet.engines)
        reachable = reachable and able >= floor
        if able == 0:
            sentence = f"none may serve {phase}, since every engine is pinned to {phase.other}"
            yield Conflict(path="engines", others=roles, sentence=sentence)
        elif able < floor:
            sentence = f"must be at most {able}, the number of engines that may serve {phase}, got {floor}"
            yield Conflict(path=f"controller.min_{phase}", others=roles, sentence=sentence)
    room = max(2, len(fleet.engines)) - floors[Phase.PREFILL]
    if reachable and floors[Phase.DECODE] > room:
        yield Conflict(
            path="controller.min_decode",
            others=("controller.min_prefill", *roles),
            sentence=f"must be at most {room}, what controller.min_prefill ({floors[Phase.PREFILL]}) leaves of "
            f"{len(fleet.engines)} engines, got {floors[Phase.DECODE]}",
        )


def _attestation(fleet: "FleetConfig") -> Iterator[Conflict]:
    """R7: an engine is checked against the contract by its document; one without the other checks nothing."""
    contract = fleet.engine_contract
    if contract is not None and not contract:
        yield Conflict(path="engine_contract", others=(), sentence="must name at least one field")
    for index, engine in enumerate(fleet.engines):
        if (engine.attestation_url is None) != (contract is None):
            yield Conflict(
                path=f"engines[{index}].attestation_url",
                others=("engine_contract",),
                sentence="must be given, since engine_contract is"
                if engine.attestation_url is None
                else "needs engine_contract, against which the document is checked",
            )


def _store(fleet: "FleetConfig") -> Iterator[Conflict]:
    store = fleet.store
    given = [key for key in ("endpoints", "ca", "cert", "key", "username", "password") if getattr(store, key)]
    if store.kind == "file":
        for key in given:
            yield Conflict(path=f"store.{key}", others=("store.kind",), sentence="needs store.kind etcd, got file")
        return
    if not store.endpoints:
        yield Conflict(path="store.endpoints", others=("store.kind",), sentence="must be given when store.kind is etcd")
    for index, endpoint in enumerate(store.endpoints):
        if endpoint in store.endpoints[:index]:
            other = f"store.endpoints[{store.endpoints.index(endpoint)}]"
            yield Conflict(
                path=f"store.endpoints[{index}]",
                others=(other,),
                sentence=f"must differ from {other}, both are {shown(endpoint)}",
            )
    schemes = {endpoint.partition(":")[0] for endpoint in store.endpoints}
    if len(schemes) > 1:
        yield Conflict(
            path="store.endpoints", others=("store.endpoints",), sentence="must be all http or all https, got both"
        )
    elif schemes == {"http"}:
        for key in ("ca", "cert", "key"):
            if key in given:
                yield Conflict(
                    path=f"store.{key}",
                    others=("store.endpoints",),
                    sentence="needs https addresses in store.endpoints, got http",
                )
    if not float(fleet.lease.ttl_s).is_integer():
        yield Conflict(
            path="lease.ttl_s",
            others=("store.kind",),
            sentence=f"must be whole seconds when store.kind is etcd, got {shown(fleet.lease.ttl_s)}",
        )


def _pairs(fleet: "FleetConfig") -> Iterator[Conflict]:
    """Fields of one section that are given together or not at all."""
    for section, keys in (
        ("store", ("cert", "key")),
        ("store", ("username", "password")),
        ("tls", ("ca", "cert", "key")),
    ):
        values = {key: getattr(getattr(fleet, section), key) for key in keys}
        present = [f"{section}.{key}" for key, value in values.items() if value is not None]
        if present:
            for key, value in values.items():
                if value is None:
                    yield Conflict(
                        path=f"{section}.{key}",
                        others=tuple(present),
                        sentence=f"must be given together with {' and '.join(present)}",
                    )


def _queue(fleet: "FleetConfig") -> Iterator[Conflict]:
    serving = fleet.serving
    if serving.queue_capacity and not serving.queue_timeout_s:
        yield Conflict(
            path="serving.queue_timeout_s",
            others=("serving.queue_capacity",),
            sentence=f"must be more than 0 when serving.queue_capacity is given ({serving.queue_capacity}), got 0",
        )
    if serving.queue_timeout_s and not serving.queue_capacity:
        yield Conflict(
            path="serving.queue_capacity",
            others=("serving.queue_timeout_s",),
            sentence="must be more than 0 when serving.queue_timeout_s is given "
            f"({shown(serving.queue_timeout_s)}), got 0",
        )


def _lease(fleet: "FleetConfig") -> Iterator[Conflict]:
    lease = fleet.lease
    if lease.safety_margin_s >= lease.ttl_s * 2 / 3:
        yield Conflict(
            path="lease.safety_margin_s",
            others=("lease.ttl_s",),
            sentence=f"must be less than two thirds of lease.ttl_s ({shown(lease.ttl_s)}), else the holder would fence "
            f"itself between two renewals, got {shown(lease.safety_margin_s)}",
        )


def _stage_timeout(fleet: "FleetConfig") -> Iterator[Conflict]:
    controller = fleet.controller
    if 0 < controller.stage_timeout_s < controller.monitor_interval_s:
        yield Conflict(
            path="controller.stage_timeout_s",
            others=("controller.monitor_interval_s",),
            sentence=f"must be 0 or at least controller.monitor_interval_s ({shown(controller.monitor_interval_s)}), "
            f"got {shown(controller.stage_timeout_s)}",
        )


# field, how it must relate, the other field, why
_ORDERED = (
    ("serving.handoff_max_age_s", "<", "engine.kv_lease_s", "engines free the KV of a handoff then"),
    ("serving.retry_base_s", "<=", "serving.retry_cap_s", ""),
    ("controller.thresholds.shrink", "<", "controller.thresholds.expand", "a role cannot give and take at once"),
    ("recovery.health.evict_windows", ">=", "recovery.health.probation_windows", "probation comes first"),
    ("engine.kv_first_pull_timeout_s", ">=", "engine.first_token_timeout_s", "first transfers take longer"),
    ("standby.max_handoff_age_s", ">", "controller.monitor_interval_s", "a handoff is written once per monitor pass"),
)
_WORDS = {"<": "less than", "<=": "at most", ">": "more than", ">=": "at least"}


def _ordered(fleet: "FleetConfig") -> Iterator[Conflict]:
    for path, relation, other, why in _ORDERED:
        left, right = _value(fleet, path), _value(fleet, other)
        holds = {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[relation]
        if not holds:
            since = why and f", since {why}"
            yield Conflict(
                path=path,
                others=(other,),
                sentence=f"must be {_WORDS[relation]} {other} ({shown(right)}){since}, got {shown(left)}",
            )


def _value(fleet: "FleetConfig", path: str) -> float:
    value: object = fleet
    for key in path.split("."):
        value = getattr(value, key)
    assert isinstance(value, int | float)
    return value


def _placement_age(fleet: "FleetConfig") -> Iterator[Conflict]:
    """Control proves that it is alive once a second: a placement that ages faster goes stale between two heartbeats."""
    age = fleet.proxy.placement_max_age_s
    if 0 < age <= 1:
        yield Conflict(
            path="proxy.placement_max_age_s",
            others=(),
            sentence=f"must be 0 (for ever) or more than 1, the interval of control's heartbeats, got {shown(age)}",
        )


def _journal(fleet: "FleetConfig") -> Iterator[Conflict]:
    """A file begins with a whole core: of many tiny files nothing else would be left."""
    size = fleet.journal.max_bytes
    if 0 < size < SMALLEST_JOURNAL:
        yield Conflict(
            path="journal.max_bytes",
            others=(),
            sentence=f"must be 0 (no journal) or at least {SMALLEST_JOURNAL}, got {shown(size)}",
        )


RELATIONS: tuple[Callable[["FleetConfig"], Iterator[Conflict]], ...] = (
    _engines_differ,
    _phases_covered,
    _attestation,
    _store,
    _pairs,
    _lease,
    _stage_timeout,
    _queue,
    _ordered,
    _placement_age,
    _journal,
)


def conflicts(fleet: "FleetConfig") -> list[Conflict]:
    """Every relation that `fleet` breaks."""
    return [conflict for relation in RELATIONS for conflict in relation(fleet)]


def _whole_answers(fleet: "FleetConfig") -> Iterator[Conflict]:
    """V11: a whole answer on an engine that gives nothing is ended once the silence was told and a probe had no answer
    either. An engine that goes on later than the lease answers with the text of blocks that are others' by then. No
    more than advice, since a prefill that takes long must not count as silence either."""
    engine, silent_leg_s = fleet.engine, fleet.recovery.silent_leg_s
    spare_s = HOLD_INTERVALS * fleet.controller.monitor_interval_s
    room_s = engine.kv_lease_s - engine.first_token_timeout_s - spare_s
    if engine.decode_read_timeout_s < engine.kv_lease_s or 0 < silent_leg_s <= room_s:
        return
    room = f"at most {shown(round(room_s, 3))}, what " if room_s > 0 else "less than "
    yield Conflict(
        path="recovery.silent_leg_s",
        others=(
            "engine.kv_lease_s",
            "engine.decode_read_timeout_s",
            "engine.first_token_timeout_s",
            "controller.monitor_interval_s",
        ),
        sentence=f"should be more than 0 and {room}a probe leaves of engine.kv_lease_s "
        f"({shown(engine.kv_lease_s)}), else an engine that stops for longer than that can go on with wrong answers; "
        f"or set engine.decode_read_timeout_s below it, got {shown(silent_leg_s)}",
    )


ADVICE: tuple[Callable[["FleetConfig"], Iterator[Conflict]], ...] = (_whole_answers,)


def advice(fleet: "FleetConfig") -> list[Conflict]:
    """What is better otherwise in a `fleet` that breaks no relation."""
    return [conflict for relation in ADVICE for conflict in relation(fleet)]
