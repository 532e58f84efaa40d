"""The subcommands of `heterocache` that ask running engines, or tell them what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_connector.tools.command import (
    ENGINES,
    EXIT_BAD,
    EXIT_OK,
    EXIT_UNUSABLE,
    MAX_SECONDS,
    Json,
    command,
    complain,
    confirm,
    note,
    number,
)

if TYPE_CHECKING:
    from hetero_connector.tools.engines import RunningEngine


_SECONDS = number(0.001, MAX_SECONDS)
_Engine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Only the engines of this model, process id or ssd_dir. Where several run, commands "
        "that change something need it.",
    ),
]
_Salt = Annotated[str | None, typer.Option(help="The `cache_salt` of its requests.")]
_Wait = Annotated[
    float, typer.Option(parser=_SECONDS, metavar="SECONDS", help="Wait so long for it at most.")
]
_Prompt = Annotated[
    Path,
    typer.Argument(metavar="PROMPT", help="A file with a JSON list of token ids, or with text."),
]
_OptionalPrompt = Annotated[
    Path | None,
    typer.Argument(
        metavar="PROMPT",
        help="A file with a JSON list of token ids, or with text.",
    ),
]
_Session = Annotated[
    str | None, typer.Option(help="This session, by its id or its digest in `top`.")
]


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    for function, *examples in (
        (status, "status", "status --json"),
        (top, "top", "top --once"),
        (
            clear,
            "clear --session agent-7",
            "clear --salt tenant-a",
            "clear --model my-adapter",
            "clear --all --yes",
        ),
        (warm, "warm system-prompt.txt", "warm ids.json --keep 3600"),
        (pin, "pin system-prompt.txt --seconds 3600", "pin --session agent-7"),
        (unpin, "unpin system-prompt.txt", "unpin --session agent-7"),
        (drain, "drain --wait 120", "drain --resume"),
        (scrub, "scrub", "scrub --rate 500", "scrub --stop"),
        (timeline, "timeline --seconds 10 --out timeline.json"),
    ):
        command(app, ENGINES, *examples)(function)


def status(
    engine: _Engine = None,
    decisions: Annotated[int, typer.Option(min=0, help="Newest decisions to show.")] = 10,
    as_json: Json = False,
) -> int:
    """Ask this user's running engines what they store and how they decided."""
    from hetero_connector.tools import engines
    from hetero_connector.tools.status import broken_parts, show

    running, silent = engines.choose(engine, may_be_all=True)
    found = [x.status for x in running]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found, decisions)
    return EXIT_BAD if silent or any(map(broken_parts, found)) else EXIT_OK


def top(
    engine: _Engine = None,
    interval: Annotated[
        float,
        typer.Option(parser=number(0.1, 3_600), metavar="SECONDS", help="Time between two looks."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
) -> int:
    """Watch running engines: tokens by source, tiers, sessions and loads. Ctrl-C ends it."""
    from hetero_connector.tools import engines
    from hetero_connector.tools.live import watch

    found = engines.choose(engine, may_be_all=True)
    for title in watch(engine, found.running, interval, once=once):
        note(f"{title} has ended")
    return EXIT_BAD if once and found.silent else EXIT_OK


def clear(
    session: Annotated[
        str | None, typer.Option(help="Forget this session, by its id or its digest in `top`.")
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(help="Forget all under this `cache_salt`; with --session: the session's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Forget what requests of this `model` stored, such as a LoRA adapter's."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget everything stored.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --all.")] = False,
    engine: _Engine = None,
    as_json: Json = False,
) -> int:
    """Make a running engine forget what it stores: all, a model's, a salt's or a session's."""
    arguments: dict[str, Any] = {"session": session, "salt": salt, "model": model}
    given = [session is not None or salt is not None, model is not None, everything]
    if given.count(True) != 1:
        return complain(
            "say what to clear: --session (with its --salt), --salt, --model or --all, and nothing "
            "else"
        )

    def is_sure(engines: Sequence[RunningEngine]) -> bool:
        titles = ", ".join(x.title for x in engines)
        return not everything or yes or confirm(f"Forget everything that is stored by {titles}?")

    def told(answer: Mapping[str, Any]) -> tuple[bool, str]:
        kept = answer.get("kept", True)
        what = "everything" if everything else f"{answer['chunks']:,} chunks"
        text = f"forgot {what}"
        if not kept:
            text += "; the disk did not take it: the next engine would find what is on it"
            text += f" ({answer['reason']})" if "reason" in answer else ""
        if not answer.get("known", True):
            text += f"; no session known here has used the model {model!r}: check the name"
        if not answer["pages"]:
            text += "; requests that run keep the pages of vLLM's own prefix cache"
        return kept, text

    return _carry_out(
        engine, {"do": "clear", "all": everything, **arguments}, told, as_json, is_sure=is_sure
    )


def warm(
    prompt: _Prompt,
    salt: _Salt = None,
    keep: Annotated[
        float,
        typer.Option(
            parser=_SECONDS, metavar="SECONDS", help="Expect its next use within this time."
        ),
    ] = 600.0,
    wait: _Wait = 20.0,
    engine: _Engine = None,
    as_json: Json = False,
) -> int:
    """Bring what a running engine stores of a prompt from SSD to DRAM."""

    def told(answer: Mapping[str, Any]) -> tuple[bool, str]:
        stored, in_dram = answer["stored_tokens"], answer["dram_tokens"]
        text = f"{stored:,} of {answer['tokens']:,} tokens are stored, {in_dram:,} of them in DRAM"
        return 0 < stored == in_dram, text

    order = {"do": "warm", "salt": salt, "keep_s": keep, "wait_s": wait}
    return _carry_out(engine, order, told, as_json, wait_s=wait, encoded=_tokens_of(prompt))


def pin(
    prompt: _OptionalPrompt = None,
    session: _Session = None,
    salt: _Salt = None,
    seconds: Annotated[
        float,
        typer.Option(parser=_SECONDS, metavar="SECONDS", help="End the pin after so long."),
    ] = 3600.0,
    engine: _Engine = None,
    as_json: Json = False,
) -> int:
    """Make a running engine evict nothing of a prompt or a session for a while."""

    def told(answer: Mapping[str, Any]) -> tuple[bool, str]:
        count, size = answer["pinned_tokens"], size_text(answer["bytes"])
        return count > 0, f"pinned {count:,} tokens, {size}, for {answer['seconds']:,.0f} s"

    from hetero_connector.units import size_text

    order = {"do": "pin", "session": session, "salt": salt, "seconds": seconds}
    return _carry_out(engine, order, told, as_json, encoded=_tokens_of(prompt))


def unpin(
    prompt: _OptionalPrompt = None,
    session: _Session = None,
    salt: _Salt = None,
    engine: _Engine = None,
    as_json: Json = False,
) -> int:
    """End the pin of a prompt or a session."""

    def told(answer: Mapping[str, Any]) -> tuple[bool, str]:
        count = answer["unpinned_tokens"]
        return count > 0, f"unpinned {count:,} tokens" if count else "there was no such pin"

    order = {"do": "unpin", "session": session, "salt": salt}
    return _carry_out(engine, order, told, as_json, encoded=_tokens_of(prompt))


def drain(
    resume: Annotated[bool, typer.Option("--resume", help="Store again.")] = False,
    wait: _Wait = 60.0,
    engine: _Engine = None,
    as_json: Json = False,
) -> int:
    """Make a running engine store nothing new, and write to SSD what is in DRAM."""

    def told(answer: Mapping[str, Any]) -> tuple[bool, str]:
        if not answer["draining"]:
            return True, "stores again"
        if answer["written"]:
            return True, "stores nothing new; all that it stored is on SSD"
        late = f"not all was written within {wait:g} s: repeat it"
        return False, f"stores nothing new; {answer.get('reason', late)}"

    order = {"do": "drain", "resume": resume, "wait_s": wait}
    return _carry_out(engine, order, told, as_json, wait_s=wait)


def scrub(
    rate: Annotated[
        float,
        typer.Option(
            parser=number(0.001, 1e6),
            metavar="MIB_PER_S",
            help="Read so much in a second at most.",
        ),
    ] = 64.0,
    stop: Annotated[bool, typer.Option("--stop", help="End the scrub that runs.")] = False,
    engine: _Engine = None,
    as_json: Json = False,
) -> int:
    """Make a running engine check all that it stores. `top` shows how far it is."""

    def told(answer: Mapping[str, Any]) -> tuple[bool, str]:
        progress = answer["scrub"]
        if progress is None:
            return True, "nothing was scrubbed yet"
        return True, f"{progress['state']}: {progress_text(progress)}"

    from hetero_connector.tools.status import progress_text

    order = {"do": "scrub", "mib_per_s": None if stop else rate, "stop": stop}
    return _carry_out(engine, order, told, as_json)


def timeline(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path(
        "heterocache-timeline.json"
    ),
    seconds: Annotated[
        float,
        typer.Option(parser=number(0.1, 60), metavar="SECONDS", help="Record for so long."),
    ] = 5.0,
    engine: _Engine = None,
) -> int:
    """Record what running engines do, for https://ui.perfetto.dev."""
    from hetero_connector.tools import engines
    from hetero_connector.tools.recording import timeline_of

    found, silent = engines.choose(engine, may_be_all=True)
    if not found:
        return EXIT_BAD
    try:
        out.touch()  # fails before the recording, not after it
        answers = engines.do(found, {"do": "record", "seconds": seconds}, seconds)
        timeline_of({x.title: y for x, y in zip(found, answers, strict=True)}).write(out)
    except OSError as error:
        return complain(error)
    code = EXIT_BAD if silent else EXIT_OK
    for x, answer in zip(found, answers, strict=True):
        if problem := answer.get("error"):
            note(f"{x.title}: {problem}")
            code = EXIT_BAD
        elif not answer["is_complete"]:
            note(f"{x.title}: more happened than is kept: record for fewer seconds")
    print(f"written: {out}")
    return code


def _tokens_of(
    prompt: Path | None,
) -> Callable[[Sequence[RunningEngine]], dict[str, Any]]:
    """Return a function that reads the prompt's tokens, by the tokenizer of the engines' model."""
    from hetero_connector.engine.scheduler.commands import pack_tokens
    from hetero_connector.tools import explanation

    def read(engines: Sequence[RunningEngine]) -> dict[str, Any]:
        if prompt is None:
            return {}
        model = engines[0].status["engine"]["model"]
        tokens = explanation.read_tokens(prompt, lambda: explanation.load_tokenizer(model))
        return {"tokens": pack_tokens(tokens)}

    return read


def _carry_out(
    name: str | None,
    order: Mapping[str, Any],
    told: Callable[[Mapping[str, Any]], tuple[bool, str]],
    as_json: bool,
    *,
    wait_s: float = 0.0,
    is_sure: Callable[[Sequence[RunningEngine]], bool] = lambda engines: True,
    encoded: Callable[[Sequence[RunningEngine]], Mapping[str, Any]] = lambda engines: {},
) -> int:
    """Have the engines of this name do something, and print what came of it.

    `told` returns whether an answer is good, and its text. `encoded` returns arguments that depend
    on the engines.
    """
    from hetero_connector.tools import engines

    try:
        chosen = engines.choose(name).running
        if not chosen:
            if as_json:
                print("[]")
            return EXIT_BAD
        if not is_sure(chosen):
            return complain("nothing was done")
        order = {k: v for k, v in {**order, **encoded(chosen)}.items() if v is not None}
    except ValueError as error:  # a prompt's tokens that are no ids
        return complain(error)
    answers = engines.do(chosen, order, wait_s)
    code = EXIT_OK
    for engine, answer in zip(chosen, answers, strict=True):
        is_good, text = (False, answer["error"]) if "error" in answer else told(answer)
        if not is_good:
            code = EXIT_UNUSABLE if answer.get("malformed") else EXIT_BAD
        if not as_json or "error" in answer:
            print(f"{engine.title}: {text}", file=sys.stderr if "error" in answer else sys.stdout)
    if as_json:
        about = ({"engine": x.status["engine"]["engine"]} for x in chosen)
        print(json.dumps([{**x, **y} for x, y in zip(about, answers, strict=True)], indent=2))
    return code
