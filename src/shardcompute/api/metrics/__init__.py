"""Prometheus metrics: which there are (`table`), and the collector that counts and writes them.

Owns every metric name, label and help text. Calls `node.service` and `node.admin` for what is as it is now; the
routes and generations of the API call it.
"""
