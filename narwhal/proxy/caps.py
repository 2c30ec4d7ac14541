"""The soft caps of engines, `max_inflight` and `max_inflight_tokens`, shared between proxies (spec P9).

Decides: whether this proxy may put more on an engine. It cannot see: the other proxies, but by the picture that control
gave last; nor which engine a leg goes to.

Each proxy may add an equal share of the room that the picture shows, rounded up, and never goes beyond the cap by what
it knows. By one picture n proxies together exceed a cap of legs by n - 1 at most, which is the rounding. Pictures are
as old as 1.5 s: load that moves from one proxy to another meanwhile may be counted on both, so that the cap is exceeded
by what moved, at worst doubled, until the next picture; nobody adds to an engine that is over its cap. Measured with
twice the load that the caps allow, in bursts: 7 over 32 with 8 proxies, 8 over 32 with 2, none with one. Tokens are
shared in the same way, where the rounding is the last leg of each proxy. The price of not asking anybody: a proxy that
gets all the load fills an engine in steps of a second.
"""

from narwhal.placement import EngineEntry
from narwhal.proxy.seams import Inflight, Picture


def is_full(cap: int, *, own: int, own_then: int, others: int, proxies: int, more: int = 1) -> bool:
    """Whether `more` may not be added under `cap`. `own_then`: what was our own in the picture that has `others`."""
    if own + others and own + others + more > cap:  # what is larger than the cap alone goes to an engine at rest
        return True
    share = -(-max(cap - others - own_then, 1) // proxies)
    return own >= own_then + share


def full(entry: EngineEntry, tokens: int, inflight: Inflight, picture: Picture) -> bool:
    """Whether a leg with `tokens` of prompt may not go to `entry`."""
    name = entry.id
    if entry.max_inflight and is_full(
        entry.max_inflight,
        own=inflight.legs.get(name, 0),
        own_then=picture.own_legs.get(name, 0),
        others=picture.legs.get(name, 0),
        proxies=picture.proxies,
    ):
        return True
    return bool(entry.max_inflight_tokens) and is_full(
        entry.max_inflight_tokens,
        own=inflight.tokens.get(name, 0),
        own_then=picture.own_tokens.get(name, 0),
        others=picture.tokens.get(name, 0),
        proxies=picture.proxies,
        more=tokens,
    )
