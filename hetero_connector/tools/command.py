"""Declaring the subcommands of `heterocache`, and what all of them do alike."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

from hetero_connector.errors import HeteroCacheError

EXIT_OK, EXIT_BAD, EXIT_UNUSABLE, EXIT_INTERRUPTED = 0, 1, 2, 130
STATUS = (
    "Exit status: 0 if all is well, 1 if a problem was found, 2 if the arguments or the input "
    "cannot be used."
)
ENGINES, STATE, FLEET, SIMULATION = (
    "Running engines",
    "State on this machine",
    "Fleet",
    "Simulation",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value to stdout.")]

_Arguments = ParamSpec("_Arguments")


def command(
    of: typer.Typer, panel: str, *examples: str, name: str | None = None
) -> Callable[[Callable[_Arguments, int]], Callable[_Arguments, None]]:
    """Register a function that returns its exit status. Its docstring is the command's help.

    An error of this package that it raises is printed: the input cannot be used.
    """
    epilog = "\n\n".join(["Examples:", *(f"heterocache {x}" for x in examples), STATUS])

    def register(function: Callable[_Arguments, int]) -> Callable[_Arguments, None]:
        @of.command(name, rich_help_panel=panel, epilog=epilog)
        @functools.wraps(function)
        def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
            try:
                code = function(*args, **kwargs)
                sys.stdout.flush()
            except HeteroCacheError as error:
                code = complain(error)
            except BrokenPipeError:  # `heterocache inspect DIR | head`
                sys.stdout = None
                code = EXIT_OK
            except KeyboardInterrupt:
                code = EXIT_INTERRUPTED
            raise typer.Exit(code)

        return run

    return register


def complain(error: Exception | str) -> int:
    """Print why the input cannot be used, and return that exit status."""
    note(error)
    return EXIT_UNUSABLE


def note(message: Exception | str) -> None:
    """Print a message to stderr."""
    print(f"heterocache: {message}", file=sys.stderr)
