"""Commands of a running cluster: `status`, `nodes`, `ps`, `plan`, `load`, `unload`, `drain`, `token`, `key`.

Owns how a command finds its cluster (`access`), how a view of it becomes text, and waiting until it has done what it
was asked. Speaks to clusters through `cluster_client` alone; may call `cli.options` and the console.
"""
