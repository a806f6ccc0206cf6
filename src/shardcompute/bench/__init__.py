"""The measurements behind every number we publish."""
