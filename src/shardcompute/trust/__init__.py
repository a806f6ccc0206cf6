"""Trust in what machines computed: who is audited, how far honest results may lie apart, whom a contradiction blames.

Numbers in, numbers out: nothing here knows machines, links, files or clocks.
"""
