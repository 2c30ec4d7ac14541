"""Python's cycle collector in a worker: seldom, because requests leave no cycles behind (a test holds that)."""

import gc

# New objects between two looks at the young ones. The default (700) looks several times per request and finds nothing.
YOUNG = 20_000


def collect_seldom() -> None:
    """Set the collector for a process that serves requests; called once, when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
