"""OwnerServe: who owns each artifact of a fleet, and where a request runs."""
