"""Access requirements: what a route asks of its caller. Every route declares one."""

from __future__ import annotations

from enum import Enum

from shardcompute.api.errors import RequestError
from shardcompute.security.api_keys import KeyRole, KeySummary

_HOW = (
    "commands on the coordinator's own machine need no key, `shardcompute page` there prints a link that signs the "
    "page in, and `shardcompute key create --role {role}` makes a key for elsewhere"
)


class Access(Enum):
    """From nothing to everything."""

    OPEN = "open"
    """Nothing: probes, the page's own files, signing in."""
    USE = "use"
    """Whoever may ask models."""
    KEY = "key"
    """A key of any role; not those whom no key was asked of."""
    OBSERVE = "observe"
    OPERATE = "operate"


_ROLES = {Access.OBSERVE: KeyRole.OBSERVE, Access.OPERATE: KeyRole.OPERATE}
ANONYMOUS = KeySummary("")
"""Who asks without a key, where none is asked for."""


def check_access(needs: Access, caller: KeySummary) -> None:
    """403 unless `caller` may do what `needs` it. Who came without a needed key has been refused before."""
    role = _ROLES.get(needs, KeyRole.USE)
    if caller.role.includes(role) and (caller.key_id or needs is not Access.KEY):
        return
    if caller.key_id:
        message = f"The API key {caller.key_id} is of role {caller.role}; this needs one of role {role}."
    elif needs is Access.KEY:
        message = "Without an API key there is nothing of your own to see."
    else:
        message = f"Without an API key this server lets you use models; this needs one of role {role}."
    raise RequestError(message, hint=_HOW.format(role=role), code="insufficient_role", status=403)
