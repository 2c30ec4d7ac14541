"""What a call to control that failed means: gRPC's errors as exceptions with one line for people.

A process that does not lead answers FAILED_PRECONDITION with a `google.rpc.ErrorInfo` of reason NOT_ACTIVE in the
status details; its metadata name the `active` as HOST:PORT and the `holder`, as far as the process knows them.
"""

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from narwhal.cli.options import AnswerIsNo, ControlUnreachable


class Unreachable(ControlUnreachable):
    """No active control process answered. The message is one line and names every address that was tried."""


class NotActive(Unreachable):
    """The process asked does not lead. `active`: HOST:PORT of the one that does, as far as it knows; may be empty."""

    def __init__(self, message: str, active: str) -> None:
        super().__init__(message)
        self.active = active


class Refused(AnswerIsNo):
    """The active control process answered with an error; the message says which, in one line."""


class Lost(Unreachable):
    """A stream ended that was to go on, or the process behind it leads no more."""


# How gRPC words what a person knows by another name; looked for in the details of UNAVAILABLE.
CLOSED = "closed the connection"
_TRANSPORT = (
    ("WRONG_VERSION_NUMBER", "does not speak TLS: leave out the TLS options"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of a CA in the file of --tls-ca"),
    ("Hostname Verification Check failed", "its certificate is not for that address: give --tls-server-name"),
    ("Failed parsing HTTP/2", "does not speak gRPC; is it the HTTP port?"),
    ("errors resolving", "name does not resolve"),
    ("DNS resolution failed", "name does not resolve"),
    ("Socket closed", CLOSED),
)


def of_a_change(address: str, error: aio.AioRpcError, *, timeout_s: float) -> Unreachable | Refused:
    """Of a call that changes something: one whose fate is not known must not be made again."""
    what = translated(address, error, timeout_s=timeout_s)
    if isinstance(what, Unreachable) and not isinstance(what, NotActive):
        return Lost(f"{what}; it may have been done all the same: see narwhalctl events")
    return what


def translated(address: str, error: aio.AioRpcError, *, timeout_s: float) -> Unreachable | Refused:
    """What to raise for an error of a call to `address`, which had `timeout_s` for its answer."""
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(f"{address}: no answer within {timeout_s:g} s")
    if code is grpc.StatusCode.FAILED_PRECONDITION and (info := _error_info(error)).reason == "NOT_ACTIVE":
        active = info.metadata.get("active", "")
        return NotActive(f"{address}: not active, " + (f"names {active}" if active else "knows no active"), active)
    if code is grpc.StatusCode.UNAVAILABLE:
        # Everything else ends in the system's own words, such as "Connection refused".
        words = next((words for part, words in _TRANSPORT if part in details), details.rpartition(": ")[2].lower())
        return Unreachable(f"{address}: {words or 'unavailable'}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"{address}: no control service of this kind: {details}")
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
        # Whole sentences about the fleet; of a failed gate one for each engine.
        return Refused("\n".join(_violations(error)) or details)
    return Refused(f"{address}: {code.name.lower().replace('_', ' ')}: {details}")


def _violations(error: aio.AioRpcError) -> list[str]:
    """What a failed gate says of each engine, a sentence each."""
    failed = error_details_pb2.PreconditionFailure()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(failed):
                    return [violation.description for violation in failed.violations]
    return []


def _error_info(error: aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return info
    return info
