"""What a process that runs makes of a fleet file that was read again (SIGHUP). Pure.

Every setting takes effect, is named as one that needs a restart, or has the whole file refused; which, the tables say.
All are compared with what the process was started with, since that is what it runs by, and not with the file read last.
"""

from collections.abc import Iterable, Mapping

from narwhal.config.fleet import FleetConfig
from narwhal.config.problems import FleetFileError, shown

# Keys that a running process cannot change, and what to do about it. Engines that serve one model answer 404 to
# requests for another, so each would have to pass its gate again: none would serve, which a slip must not bring about.
NAME = {"name": "needs a restart"}
CONTROL_REFUSED = {
    **NAME,
    "model": "needs a restart, at which every engine is asked what it serves before it gets requests",
}
PROXY_REFUSED = NAME  # control's model stands above that of its file
# Sections that are read at the start only, by each program.
CONTROL_FIXED = ("store", "lease", "journal", "tls")
PROXY_FIXED = ("tls",)


def refuse_reload(running: FleetConfig, read: FleetConfig, refused: Mapping[str, str]) -> None:
    """Raises FleetFileError when a process that runs by `running` cannot go on by what was `read`."""
    problems = [
        f"{key}: cannot change from {shown(getattr(running, key))} to {shown(getattr(read, key))} while the process "
        f"runs: that {why}"
        for key, why in refused.items()
        if getattr(read, key) != getattr(running, key)
    ]
    if problems:
        raise FleetFileError(problems)


def restart_words(running: FleetConfig, read: FleetConfig, fixed: Iterable[str]) -> str:
    """What is added to the line about a file that was read again: the sections that do not take effect, if any."""
    changed = [section for section in fixed if getattr(read, section) != getattr(running, section)]
    return f"; what differs in {', '.join(changed)} from the start needs a restart" if changed else ""
