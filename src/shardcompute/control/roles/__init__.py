"""Roles of machines that no ring needs: what they do for the others, assigned by measurement. Pure."""
