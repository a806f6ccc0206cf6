"""Shells around it all: driver, worker, coordinator, how machines join, and what the API calls."""
