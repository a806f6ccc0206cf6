"""The cluster's admin API: state and events, models, nodes, join tokens, API keys, usage, teaching draft heads.

Owns the bodies of its requests; replies are the views of `node.admin`, written as they are. May call a `ClusterAdmin`,
the API's own top modules and (`teaching`) generations; knows nothing of the protocols beside it.
"""

from shardcompute.api.cluster.finetuning import FINETUNING_ROUTES
from shardcompute.api.cluster.ledger import LEDGER_ROUTES
from shardcompute.api.cluster.routes import CLUSTER_ROUTES
from shardcompute.api.cluster.teaching import TEACHING_ROUTES

ROUTES = (*CLUSTER_ROUTES, *FINETUNING_ROUTES, *LEDGER_ROUTES, *TEACHING_ROUTES)

__all__ = ["ROUTES"]
