"""Other engines' state: reading it, letting them read ours, adopting what a dead engine left.

May import the catalog and `hetero_connector.transfer`. Knows no directory: what the fleet says
comes in through `ports.Peers`.
"""
