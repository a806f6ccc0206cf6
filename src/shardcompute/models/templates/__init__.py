"""Chat templates as programs of strangers: the engine that runs them, what it costs, and where it may be done.

Owns Jinja. A template that `proof` finds plain runs in this process, metered; any other runs in a process of its own,
which can be ended (`sandbox`). Calls `core` alone; `models.chat_template` calls it.
"""
