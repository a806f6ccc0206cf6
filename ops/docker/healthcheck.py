"""Whether what this container runs is alive: an API that answers (a model may still be on its way), or a worker."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request

from shardcompute.core.settings import load_settings
from shardcompute.node.process.pidfile import CLUSTER_FILE, DRIVER_FILE, WORKER_FILE, Running, read_running
from shardcompute.security.https.clients import trusting


def main() -> int:
    home = load_settings().data_dir
    if read_running(home / "worker" / WORKER_FILE) is not None:
        return 0
    for folder, file in (("cluster", CLUSTER_FILE), ("driver", DRIVER_FILE)):
        running = read_running(home / folder / file)
        if running is not None and running.api_url:
            return 0 if _answers(running) else 1
    return 1


def _answers(running: Running) -> bool:
    trust: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if running.api_certificate:
        context: ssl.SSLContext = trusting(running.api_certificate)
        trust.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*trust).open(f"{running.api_url}/health", timeout=4):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 503
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
