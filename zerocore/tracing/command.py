"""`python -m zerocore trace`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from zerocore.numerals import positive, whole
from zerocore.tracing.files import TraceFile, ranks_beside
from zerocore.tracing.merging import aligned, merge, read
from zerocore.tracing.report import report


def add(commands: argparse._SubParsersAction) -> None:
    """Adds the command and its own ones."""
    about = "what zerocore.trace recorded: the ranks' files as one, and where the time went"
    command = commands.add_parser("trace", help=about, description=f"Shows {about}.")
    actions = command.add_subparsers(metavar="ACTION", required=True)
    files = "what zerocore.trace wrote; out.json stands for out.rank0.json and so on"

    about = "one trace with all ranks, on one clock"
    action = actions.add_parser("merge", help=about, description=f"Makes {about}.")
    action.set_defaults(run=_run_merge)
    action.add_argument("files", nargs="+", type=Path, metavar="FILES", help=files)
    out = "the new file (if FILES is one name that stands for the ranks' files: that one)"
    action.add_argument("-o", "--out", type=Path, metavar="OUT", help=out)

    about = "where the time of steps went, over steps and ranks"
    action = actions.add_parser("report", help=about, description=f"Prints {about}.")
    action.set_defaults(run=_run_report)
    add = action.add_argument
    add("files", nargs="+", type=Path, metavar="FILES", help=f"{files}, or a merged file")
    peak = "floating-point operations a second that one rank's device can do, such as 989e12"
    add("--peak-flops", type=positive, metavar="F", help=peak)
    skip = "steps left out at the beginning (1: the first one makes buffers)"
    add("--skip", type=whole, default=1, metavar="N", help=skip)
    add("--png", type=Path, metavar="OUT", help="draw a step's windows and timeline too")


def _told(name: str, run: Callable[[], None]) -> int:
    """0, 1 if it failed, 2 if what it was given is wrong: errors go to stderr."""
    try:
        run()
    except ValueError as error:
        print(f"zerocore trace {name}: {error}", file=sys.stderr)
        return 2
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        print(
            f"zerocore trace {name}: FILES: expected whole traces of zerocore's, got a damaged "
            f"one: {error!r}",
            file=sys.stderr,
        )
        return 2
    except (OSError, ImportError) as error:
        print(f"zerocore trace {name}: {error}", file=sys.stderr)
        return 1
    return 0


def _run_merge(options: argparse.Namespace) -> int:
    def run() -> None:
        files, out = options.files, options.out
        ranks = ranks_beside(files[0]) if len(files) == 1 else []
        if out is None and not ranks:
            raise ValueError(
                f"-o: expected where to write to, or FILES to be one name with files of ranks "
                f"beside it (out.json with out.rank0.json), got {', '.join(map(str, files))}"
            )
        traces = read(ranks or files)
        out = out or files[0]
        with TraceFile("-o", out) as file:
            document = merge(traces)
            file.write(document)
        for rank, clock in document["zerocore"]["clocks"].items():
            shift = f"times shifted by {1e3 * clock['shift_seconds']:.3f} ms"
            print(f"rank {rank}: {shift} ({clock['by']})")
        print(f"{out}: {len(traces)} of {traces[0].about['world']} ranks")

    return _told("merge", run)


def _run_report(options: argparse.Namespace) -> int:
    def run() -> None:
        files = options.files
        if len(files) == 1 and not files[0].exists():
            files = ranks_beside(files[0]) or files
        if options.png is not None:
            if options.png.suffix != ".png":
                raise ValueError(f"--png: expected a name such as out.png, got {options.png}")
            with TraceFile("--png", options.png):
                pass  # it can be written
        traces, _ = aligned(read(files))
        print(report(traces, options.skip, options.peak_flops))
        if options.png is not None:
            from zerocore.tracing.picture import draw  # takes a second to import

            draw(traces, options.skip, options.png)
            print(f"drawn: {options.png}")

    return _told("report", run)
