"""Benchmarks: the measurements behind every number we publish, as ratios within one run, arms interleaved.

One file per benchmark; shared are its results and JSON (`report`), tables (`tables`), servers in processes of their own
(`servers`) and streams as clients see them (`streaming`). May call everything below `api`, and starts real servers
through the command line; nothing but `cli.tools` imports it.
"""
