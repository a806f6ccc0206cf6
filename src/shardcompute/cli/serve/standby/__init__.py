"""Standby: a coordinator that shares its journal with others, and waits to lead.

May call the rest of `serve`; nothing there but `foreground` calls it.
"""
