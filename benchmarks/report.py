"""A command that measures groups of figures and prints them, one JSON line each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import msgspec

from benchmarks.figures import Figure
from benchmarks.machine import machine
from benchmarks.peer import ENVIRONMENT, find_or_make
from benchmarks.sides import SideError, Sides

# Given the peer's interpreter, or None.
Opener = Callable[[Path | None], Sides]
Group = Callable[[Sides, Any], Iterator[Figure]]


def main(
    command: str,
    what: str,
    stages: Sequence[tuple[Opener, Mapping[str, Group]]],
    efforts: tuple[Any, Any],
    arguments: Sequence[str] | None,
) -> None:
    """Measure what the command line asks for.

    Prints a line that describes the machine first.

    Args:
        command: the name of the module.
        what: what it measures.
        stages: how to open the sides, and the groups of figures to measure with them, by name.
        efforts: how much is measured; the second one in a quick run.
        arguments: the command line.
    """
    names = [name for _, groups in stages for name in groups]
    options = _parser(command, what, names).parse_args(arguments)
    try:
        _run(stages, efforts[options.quick], options)
    except (SideError, FileExistsError) as error:
        sys.exit(str(error))


def _run(
    stages: Sequence[tuple[Opener, Mapping[str, Group]]], effort: Any, options: argparse.Namespace
) -> None:
    peer = None if options.no_peer else find_or_make(options.peer_env)
    with ExitStack() as stack:
        outputs = [sys.stdout]
        if options.json_out:
            outputs.append(stack.enter_context(options.json_out.open("w", encoding="utf-8")))
        described = False
        for open_sides, groups in stages:
            wanted = [group for name, group in groups.items() if name in (options.only or groups)]
            if not wanted:
                continue
            with open_sides(peer) as sides:
                if not described:
                    _print(msgspec.json.encode(_circumstances(sides)).decode(), outputs)
                    described = True
                for group in wanted:
                    for figure in group(sides, effort):
                        _print(figure.line(), outputs)


def _circumstances(sides: Sides) -> dict[str, Any]:
    found = {
        "machine": machine(),
        "ours": sides.ours.versions | sides.ours.ask("benchmarks.redis_work.describe_server"),
    }
    if sides.peer is not None:
        found["transfer_queue"] = sides.peer.versions
    return found


def count(number: int, what: str) -> str:
    """``1 reader``, ``4 readers``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _print(line: str, outputs: Sequence[TextIO]) -> None:
    for output in outputs:
        print(line, file=output, flush=True)


def _parser(command: str, what: str, names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command}",
        description=f"Measure {what}, ours and transfer_queue's.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute: fewer sizes and repetitions"
    )
    parser.add_argument("--only", nargs="+", choices=names, help="these groups of figures")
    parser.add_argument("--json-out", type=Path, metavar="FILE", help="write the lines there too")
    parser.add_argument("--no-peer", action="store_true", help="without transfer_queue")
    parser.add_argument(
        "--peer-env",
        type=Path,
        default=ENVIRONMENT,
        metavar="DIRECTORY",
        help="environment that has transfer_queue, or where to make one (default: %(default)s)",
    )
    return parser
