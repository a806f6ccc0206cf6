"""Commands for operators: `doctor`, `logs`, `completion`, and `bench` with all its measurements.

Owns the checks of a machine, tailing of logs, and how benchmarks are started and shown; `bench` measures.
May call `bench`, `sim`, `cli.options` and the console.
"""
