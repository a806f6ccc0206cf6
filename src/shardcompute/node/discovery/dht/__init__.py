"""A small Kademlia of our own in which clusters leave signed records of where they are.

`records` are what is kept, `messages` what is said in one datagram, `table` whom a node knows, `node` what it answers
and how it looks things up (both without sockets), `udp` the socket, `publishing` what coordinators and members do with
it. Nothing that is found is believed but by its signature.
"""
