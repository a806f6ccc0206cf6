"""`shardcompute service`: commands kept running in the background by systemd, launchd or the Task Scheduler.

Owns the files that these read, and what they run. May call `cli.options`, `node` and what commands share.
"""
