"""Moving bytes between the DRAM arena and files, and checking what was moved.

`base.py` is the contract (`FileTransfer`); `nixl_files.py`, `pread_files.py` and
`memory_files.py` implement it, `throttled_files.py` slows one down; `choose.py` picks one.
One contract suite of tests runs on all: a new one needs an entry there and nothing else.
May import `errors.py`; `nixl` is imported nowhere else in the package.
"""
