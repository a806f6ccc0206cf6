"""Telemetry: what people and dashboards see of generations. Request log, usage, traffic, traces.

Owns counts and times of requests that run or ended lately, usage by API key, and what went over links. Keeps no text
and no token. May call `core`, `wire`'s timings and `security`'s private files; is written to by
drivers, read by the API and `admin`.
"""
