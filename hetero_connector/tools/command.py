"""Declaring the subcommands of `heterocache`, and what all of them do alike."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import typer

from hetero_connector.errors import CommandError, HeteroCacheError

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
MAX_SECONDS = 86_400.0
"""Longest time that an option takes: a day."""

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


def number(least: float, most: float) -> Callable[[Any], float]:
    """Return the parser of an option's number. Unlike a range of click's, it refuses NaN."""

    def parse(text: Any) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise typer.BadParameter(f"expected a number from {least:g} to {most:g}, got {text}")
        return number

    return parse


def confirm(question: str) -> bool:
    """Ask the user before everything is forgotten. Raises CommandError if there is none to ask."""
    if sys.stdin is None or not sys.stdin.isatty():  # None: it is closed, as by `<&-`
        raise CommandError("this forgets everything stored: add --yes if you mean it")
    return typer.confirm(question, err=True)


def complain(error: Exception | str) -> int:
    """Print why the input cannot be used, and return that exit status."""
    note(error)
    return EXIT_UNUSABLE


def note(message: Exception | str) -> None:
    """Print a message to stderr."""
    print(f"heterocache: {message}", file=sys.stderr)
