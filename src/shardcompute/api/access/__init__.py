"""Access to the API: what each route asks for, which names of this server are its own, how the page signs in.

Owns the rules; `api.auth` applies them to every request, once. May call `security`, and the API's errors and bodies.
"""
