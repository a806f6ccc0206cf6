"""`shardcompute bench …`: one module for each family of measurements, which reads options and prints tables.

What is measured, and how, lies in `shardcompute.bench`.
"""
