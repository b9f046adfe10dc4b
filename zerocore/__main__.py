"""The command line: `python -m zerocore COMMAND`."""

from __future__ import annotations

import argparse
import sys

from zerocore import env


def run_env(options: argparse.Namespace) -> int:
    """Prints what was built, found, chosen and is missing; 1 if zerocore cannot be used at all."""
    build, machine = env.find_build(), env.find_machine()
    broken = isinstance(build, str)
    choice = env.find_choice()
    print(env.report(build, machine, choice, env.problems(build, machine)))
    return 1 if broken else 0


def parser() -> argparse.ArgumentParser:
    """One subcommand each; `run` is its function, which returns the exit status."""
    result = argparse.ArgumentParser(prog="python -m zerocore", description="zerocore's commands.")
    commands = result.add_subparsers(metavar="COMMAND", required=True)
    about = "what zerocore was built for, what this machine has, and what is missing"
    command = commands.add_parser("env", help=about, description=f"Prints {about}.")
    command.set_defaults(run=run_env)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Runs one command."""
    options = parser().parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
