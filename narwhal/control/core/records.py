"""What people are told: the kinds of events, and one of them in words. Pure, frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EventKind(StrEnum):
    """Everything an operator can be told of, one kind each."""

    ENGINE_JOINED = "engine_joined"
    ENGINE_READMITTED = "engine_readmitted"
    ENGINE_EJECTED = "engine_ejected"
    ENGINE_ADDED = "engine_added"
    ENGINE_REMOVED = "engine_removed"
    ENGINE_CHANGED = "engine_changed"
    ENGINE_CHECK_FAILED = "engine_check_failed"
    DRAIN_BEGUN = "drain_begun"
    DRAIN_SETTLED = "drain_settled"  # ready to stop (spec R4)
    DRAIN_OVERDUE = "drain_overdue"
    DRAIN_CHANGED = "drain_changed"
    UNDRAIN_BEGUN = "undrain_begun"
    UNDRAIN_FAILED = "undrain_failed"  # the drain stays (spec R5)
    IDENTITY_CAPTURED = "identity_captured"
    HOLD_PLACED = "hold_placed"
    HOLD_ENDED = "hold_ended"
    LAST_ENGINE_KEPT = "last_engine_kept"  # serves in spite of a soft hold (spec H2)
    HEALTH_CHANGED = "health_changed"
    ROLE_MOVED = "role_moved"
    ROLE_PROPOSED = "role_proposed"  # in advisory mode: decided, and nothing changed
    ROLE_RISK = "role_risk"  # a role that gave up an engine is short of it (spec C4)
    FLEET_SLOW = "fleet_slow"  # most engines drift: it is overload, not an engine (spec H5)
    FLEET_USUAL = "fleet_usual"  # it drifts no more, or what it takes is what is usual from now on
    PROBE_STARTED = "probe_started"
    PROBE_ENDED = "probe_ended"
    RELAPSED = "relapsed"
    PRODUCER_BLAMED = "producer_blamed"
    CONTROL_CUT_OFF = "control_cut_off"  # the sweep says so, not that the engines are dead (spec L4)
    CONTROL_BACK = "control_back"
    PROXY_SUSPECT = "proxy_suspect"  # it is itself the fault (spec F12)
    PROXY_TRUSTED = "proxy_trusted"
    PROXY_CONNECTED = "proxy_connected"
    PROXY_LOST = "proxy_lost"
    PROXY_LEFT = "proxy_left"
    PROXY_RETIRED = "proxy_retired"
    PROXY_FORGOTTEN = "proxy_forgotten"
    PLACEMENT_REFUSED = "placement_refused"
    STAGE_FAILED = "stage_failed"
    MONITOR_DEGRADED = "monitor_degraded"
    MONITOR_RECOVERED = "monitor_recovered"
    READY = "ready"
    NOT_READY = "not_ready"
    # Told by the shell: what the process itself is and does.
    CONTROL_ACTIVE = "control_active"
    CONTROL_STANDBY = "control_standby"
    CONTROL_WAITING = "control_waiting"  # nobody leads, and it may not yet
    CONTROL_FENCED = "control_fenced"
    CONTROL_YIELDED = "control_yielded"  # to a standby (spec M8), or as an operator asked
    CONTROL_STOPPING = "control_stopping"
    CONTROL_RELEASED = "control_released"  # it lets go of the lease and acts no more
    YIELD_REFUSED = "yield_refused"
    ACTIVE_MISSED = "active_missed"  # a standby counts answers of the active that are not control-ready (spec M8)
    ACTIVE_BACK = "active_back"
    HANDOFF_RESUMED = "handoff_resumed"
    HANDOFF_NOT_RESUMED = "handoff_not_resumed"
    STORE_FAILED = "store_failed"
    STORE_RECOVERED = "store_recovered"
    STORE_WARNING = "store_warning"  # it works, and somebody should look at it
    JOURNAL_FAILED = "journal_failed"
    JOURNAL_RECOVERED = "journal_recovered"
    RELOADED = "reloaded"
    RELOAD_REFUSED = "reload_refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Tell people: a log line, a journal line, an entry of `narwhalctl events`. The words are written here only."""

    kind: EventKind
    message: str
    engine: str = ""
    proxy: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
