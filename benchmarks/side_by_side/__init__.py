"""The same requests through every KV connector that a user could pick, in one run.

`contestants` has the contract of a contestant and the table of all; `environments` makes their
environments; `processes` starts what they need; `work` sends the requests; `faults` breaks things;
`report` makes tables and figures of the rows, and is pure. To add a contestant, add an entry to
`contestants.CONTESTANTS`.
"""
