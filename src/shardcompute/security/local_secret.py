"""Local secret: what lets commands on the coordinator's own machine operate the cluster, without a key.

No address is trusted, as a proxy on this machine has the same one as its users. Whoever can read the file may operate
the cluster: it is made anew at each start, for its owner alone, and is never read through a link or from somebody
else's file.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from shardcompute.core.errors import SourceError
from shardcompute.security.private_files import read_owned, replace_private

SECRET_FILE = "operator.secret"
SECRET_PREFIX = "sk-local-"
_RANDOM_BYTES = 32


@contextlib.contextmanager
def local_secret(folder: Path) -> Iterator[str]:
    """A new secret in `folder`, in the place of the last one, until the block ends."""
    path = folder / SECRET_FILE
    secret = SECRET_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    # Moved into place, which takes the place of a link instead of following it.
    replace_private(path, f"{secret}\n".encode("ascii"))
    try:
        yield secret
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def read_local_secret(folder: Path) -> str | None:
    """The secret of the cluster in `folder`, None where it has none; SourceError where it cannot be trusted."""
    try:
        content = read_owned(folder / SECRET_FILE)
    except FileNotFoundError:
        return None
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        secret = ""
    if not secret.startswith(SECRET_PREFIX) or not secret.isprintable() or " " in secret:
        raise SourceError(
            f"{folder / SECRET_FILE} is damaged", hint="start the cluster again, which makes a new one"
        )
    return secret
