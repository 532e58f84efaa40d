"""The subcommands of `heterocache` that read recorded requests, and simulate fleets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero_connector.errors import HeteroCacheError
from hetero_connector.tools.command import EXIT_OK, SIMULATION, Json, command, complain

_Format = Annotated[
    str | None, typer.Option(help="Format of the trace. Its first line tells if this is not set.")
]


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    trace = typer.Typer(help="Analyse recorded requests.", no_args_is_help=True)
    app.add_typer(trace, name="trace", rich_help_panel=SIMULATION)
    command(trace, SIMULATION, "trace stats conversation_trace.jsonl", name="stats")(trace_stats)
    command(
        trace,
        SIMULATION,
        "trace decisions decisions.jsonl",
        "trace decisions decisions.jsonl --policies ownerserve,dynamo --fleet fleet.yaml",
        name="decisions",
    )(trace_decisions)
    command(
        app,
        SIMULATION,
        "simulate --trace T.jsonl --fleet fleet.yaml --out results --policies ownerserve,dynamo_kv",
        "simulate --trace T.jsonl --fleet fleet.yaml --out results --sweep rate=0.2,0.4",
    )(simulate)


def trace_stats(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A trace, plain or gzip, or a directory of its files."),
    ],
    format: _Format = None,
    as_json: Json = False,
) -> int:
    """Print statistics of the prefixes that a trace uses again."""
    from ownership.simulator.traces.tables import print_stats

    try:
        print_stats(file, format, as_json=as_json)
    except (HeteroCacheError, OSError) as e:
        return complain(e)
    return EXIT_OK


def trace_decisions(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file `decisions` of a router, or a gzip.")
    ],
    policies: Annotated[
        str, typer.Option(metavar="A,B,...", help="Policies to compare; all if this is not set.")
    ] = "",
    every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ask them about one of N decisions.")
    ] = 1,
    fleet: Annotated[
        Path | None,
        typer.Option(help="Simulate the whole log, too, on the fleet of this YAML file."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare a router's decisions with what came of them, and with other policies' ones."""
    from ownership.scheduling.registry import POLICIES
    from ownership.simulator.decisions.command import look_back

    names = [name for name in policies.split(",") if name] or list(POLICIES)
    try:
        look_back(file, names, every, fleet, as_json=as_json)
    except ImportError as e:  # msgspec raises its own where PyYAML is missing
        return complain(f"{e.name or e} is missing: pip install 'heterocache[sim]'")
    except (HeteroCacheError, OSError) as e:
        return complain(e)
    return EXIT_OK


def simulate(
    trace: Annotated[Path, typer.Option(help="A trace file, or a directory of them.")],
    fleet: Annotated[Path, typer.Option(help="YAML file, see docs/internals/simulator.md.")],
    out: Annotated[
        Path, typer.Option(help="Output directory; an interrupted sweep in it is resumed.")
    ],
    format: _Format = None,
    policies: Annotated[
        str, typer.Option(metavar="A,B,...", help="Scheduling policies to compare.")
    ] = "ownerserve",
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,...",
            help="Values of workers, rate, sharing, sessions, seed, half, begin_s, end_s, speed or "
            "population. May be repeated.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Simulations to run in parallel.")] = 1,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Record the only simulation, for https://ui.perfetto.dev."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Simulate a fleet on a recorded trace."""
    try:
        from ownership.simulator.sweeps import command
        from ownership.simulator.sweeps.running import Inputs

        inputs = Inputs(trace, format, fleet)
        names = [name for name in policies.split(",") if name]
        command.sweep(
            inputs, names, sweep or [], out, processes, as_json=as_json, timeline=timeline
        )
    except ImportError as e:  # msgspec raises its own where PyYAML is missing
        return complain(f"{e.name or e} is missing: pip install 'heterocache[sim]'")
    except (HeteroCacheError, OSError) as e:
        return complain(e)
    return EXIT_OK
