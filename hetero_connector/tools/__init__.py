"""The `heterocache` command: run by people, never inside an engine.

Owns the command line (`cli`) and one module for each command that reads this machine or an SSD
directory: `doctor`, `inspection` (`heterocache inspect`), `verification` (`heterocache verify`)
and `explanation` (`heterocache explain`); `profile_plot` draws what `heterocache calibrate`
measured. May import every other package; nothing imports it. Add a command in `cli`, and its work
in a module of its own.
"""
