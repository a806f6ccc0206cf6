"""The cluster's admin API: state and events, models, nodes, join tokens, API keys, usage.

Owns the bodies of its requests; replies are the views of `node.admin`, written as they are. May call a `ClusterAdmin`
and the API's own top modules; knows nothing of generations and of the protocols beside it.
"""

from shardcompute.api.cluster.routes import CLUSTER_ROUTES as ROUTES

__all__ = ["ROUTES"]
