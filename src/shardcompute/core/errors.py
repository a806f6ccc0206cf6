"""Every error a user can meet, drawn once.

    ShardComputeError
    ├── UsageError                 the command or request is wrong                      exit 2, HTTP 400
    │   ├── PromptTooLongError     prompt + answer do not fit the context               exit 2, HTTP 400
    │   ├── RowGapError            rows of a session came before those that they follow exit 2, HTTP 400
    │   ├── UnknownModelError      no such model here or at the source                  exit 3, HTTP 404
    │   └── WouldReplaceError      it would end what is served, and nobody said it may  exit 2, HTTP 409
    ├── UnsupportedModelError      we know what it is and refuse to run it wrongly      exit 4, HTTP 400
    ├── CorruptModelError          a file lies about itself, is cut short or damaged    exit 5, HTTP 500
    ├── SourceError                a source cannot be reached, read or written          exit 6, HTTP 502
    │   ├── DiskFullError          no room for what is being written                    exit 6, HTTP 507
    │   ├── JournalError           a cluster's journal is missing or damaged            exit 6, HTTP 500
    │   ├── StoreError             the store that coordinators share does not answer    exit 6, HTTP 503
    │   └── NotLeadingError        another coordinator decides now                      exit 6, HTTP 503
    ├── CapacityError              no memory, page or slot left for this                exit 7, HTTP 503
    │   ├── QueueFullError         too many requests are waiting                        exit 7, HTTP 429
    │   └── DeviceMemoryError      a device had less memory than it was planned with    exit 7, HTTP 503
    ├── BackendError               a backend is missing or failed                       exit 8, HTTP 500
    ├── LinkError                  a peer is out of reach or broke the protocol         exit 9, HTTP 502
    │   ├── LinkClosedError        the connection to a peer ended                       exit 9, HTTP 502
    │   ├── CollectiveError        ranks that compute together cannot go on             exit 9, HTTP 502
    │   └── WrongProductError      a peer's products of shares are wrong                exit 9, HTTP 502
    ├── AuthError                  a token, key or certificate is not accepted          exit 10, HTTP 401
    │   └── ForbiddenError         proven, but not allowed to do this                   exit 10, HTTP 403
    └── CancelledError             the user stopped it                                  exit 130, HTTP 499

Each error says what happened and why in its message, and what to do next in `hint`.
"""

from __future__ import annotations

from typing import ClassVar


class ShardComputeError(Exception):
    """Base of all our errors: a message for people, a hint on what to do, an exit code and an HTTP status."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(ShardComputeError):
    exit_code = 2
    http_status = 400


class PromptTooLongError(UsageError):
    pass


class RowGapError(UsageError):
    pass


class UnknownModelError(UsageError):
    exit_code = 3
    http_status = 404


class WouldReplaceError(UsageError):
    http_status = 409


class UnsupportedModelError(ShardComputeError):
    exit_code = 4
    http_status = 400


class CorruptModelError(ShardComputeError):
    exit_code = 5


class SourceError(ShardComputeError):
    exit_code = 6
    http_status = 502


class DiskFullError(SourceError):
    http_status = 507


class JournalError(SourceError):
    http_status = 500


class StoreError(SourceError):
    http_status = 503


class NotLeadingError(SourceError):
    http_status = 503


class CapacityError(ShardComputeError):
    exit_code = 7
    http_status = 503


class QueueFullError(CapacityError):
    http_status = 429


class DeviceMemoryError(CapacityError):
    pass


class BackendError(ShardComputeError):
    exit_code = 8


class LinkError(ShardComputeError):
    exit_code = 9
    http_status = 502


class LinkClosedError(LinkError):
    pass


class CollectiveError(LinkError):
    """`rank` failed, as far as is known, in the call `sequence` of `operation`; the message says the same."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        rank: int | None = None,
        operation: str = "",
        sequence: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.operation = operation
        self.sequence = sequence


class WrongProductError(LinkError):
    pass


class AuthError(ShardComputeError):
    exit_code = 10
    http_status = 401


class ForbiddenError(AuthError):
    http_status = 403


class CancelledError(ShardComputeError):
    exit_code = 130
    http_status = 499


def rebuild_error(
    code: str, message: str, hint: str = "", otherwise: type[ShardComputeError] = ShardComputeError
) -> ShardComputeError:
    """The error that another node met, by the name of its kind; `otherwise` where that is none of ours."""
    kind = globals().get(code)
    if not (isinstance(kind, type) and issubclass(kind, ShardComputeError)):
        kind = otherwise
    return kind(message, hint=hint)
