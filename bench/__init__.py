"""A load generator for speech: a client like any other, which knows nothing of the gateway but its address.

cli -> compare, report, selftest, sweep -> search, reading, results -> clients, load -> corpus, metrics -> record, statistics
"""
