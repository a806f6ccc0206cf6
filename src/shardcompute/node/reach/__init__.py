"""How nodes reach each other across routers: every way that there is, tried side by side."""
