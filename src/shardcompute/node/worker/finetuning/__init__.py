"""Fine-tuning on a worker: one stage of a run, opened by its driver and gone with the driver's link.

Owns the stage's order of life (`host`), what it does for its driver (`stage_run`) and its links with the stages before
and behind (`neighbours`). Nothing of torch is imported before a run is opened.
"""

from __future__ import annotations

from shardcompute.node.worker.finetuning.host import FinetuneHost

__all__ = ["FinetuneHost"]
