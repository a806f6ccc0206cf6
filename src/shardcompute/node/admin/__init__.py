"""Administration of a running cluster: views of it, its feed of news, loading, planning, tokens and keys.

Owns what people see and may ask (`admin`), models on their way to being served (`downloads`), and incidents. May call
the cluster and its coordinator; the HTTP API and the command line know a cluster by its `views`.
"""
