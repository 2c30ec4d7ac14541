"""Where simulated engines are known to part from recorded ones; docs/real-engines.md has the reasons by their names.

A line that no longer shows must be taken out: the tests compare both ways.
"""

# reason -> (situation, step) -> lines as `shapes.differences` gives them
KNOWN: dict[str, dict[tuple[str, str], list[str]]] = {
    "unknown-request": {
        ("handoff-of-unknown-request", "decode leg"): ["status: recorded 200, simulated 500"],
    },
    "no-engine-id": {
        ("lethal-without-engine-id", "decode leg"): [
            "status: recorded None, simulated 500",
            "end: recorded 'silent', simulated 'complete'",
            "framing: recorded None, simulated 'length'",
            "connection: recorded None, simulated 'kept'",
        ],
    },
    "push-mode": {
        ("handoff-by-push", "decode leg"): ["status: recorded 200, simulated 500"],
    },
}
