"""Whether what this container runs is alive: an API that answers (a model may still be on its way), or a worker."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from shardcompute.core.settings import load_settings
from shardcompute.node.process.pidfile import CLUSTER_FILE, DRIVER_FILE, WORKER_FILE, read_running


def main() -> int:
    home = load_settings().data_dir
    if read_running(home / "worker" / WORKER_FILE) is not None:
        return 0
    for folder, file in (("cluster", CLUSTER_FILE), ("driver", DRIVER_FILE)):
        running = read_running(home / folder / file)
        if running is not None and running.api_url:
            return 0 if _answers(f"{running.api_url}/health") else 1
    return 1


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=4):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 503
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
