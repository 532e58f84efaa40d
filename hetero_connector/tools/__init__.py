"""The `heterocache` command: run by people, never inside an engine.

- `cli` declares the command line, `command` what all commands do alike.
- Running engines: `engine_commands`; `engines` finds and asks them, `status` and `live` (`top`)
  show them, `recording` makes timelines.
- State on this machine: `doctor`, `inspection`, `verification`, `explanation`; `side_files` reads
  what lies next to a journal.
- Moving a store: `exporting` and `importing`, whose files `export_format` defines.
- Recorded requests and simulated fleets: `simulation_commands`.

May import every other package; nothing imports it. Add a command in `cli` or a module of commands,
and its work in a module of its own.
"""
