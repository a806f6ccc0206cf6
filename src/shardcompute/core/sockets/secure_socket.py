"""A TLS socket that is closed where its peer has gone before TLS begins."""

from __future__ import annotations

import errno
import ssl
from typing import Any


class SecureSocket(ssl.SSLSocket):
    """Python would leave that to the collector: the socket that was given is already detached, and the one in the
    making is nobody's. Set as a context's `sslsocket_class`."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            if hasattr(self, "_connected"):  # it is somebody's
                raise
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the peer has gone") from error
