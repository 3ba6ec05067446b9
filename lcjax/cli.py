"""The ``lcjax`` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; those of the process if None.

    Returns:
        The exit code: 0 if all went well, 1 if not, 2 if the arguments make no sense.
    """
    parser = argparse.ArgumentParser(prog="lcjax", description="A checkpoint codec for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_demo(commands)
    _add_inspect(commands)
    _add_bench(commands)
    options = parser.parse_args(argv)
    return options.call(options)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``lcjax demo``."""
    demo = commands.add_parser(
        "demo",
        help="train a small transformer, kill it, resume it, and compare with plain Orbax",
        description="Trains a transformer of 2 million parameters on the source of Python's "
        "standard library three times: killed in the middle of a save and resumed, without "
        "interruption, and with plain Orbax. Takes under 4 minutes on 2 cores.",
    )
    demo.add_argument("--out", type=pathlib.Path, default=pathlib.Path("lcjax-demo"), metavar="DIR")
    demo.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures there")
    demo.add_argument("--steps", type=int, help="optimizer steps of each run")
    demo.add_argument("--preset", default="paper", help="preset of lcjax (default: paper)")
    demo.add_argument("--bits", type=int, help="bits per symbol (default of paper: 3)")
    demo.add_argument("--quick", action="store_true", help="a tiny model and a few steps")
    demo.set_defaults(call=_demo)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``lcjax inspect``."""
    parser = commands.add_parser(
        "inspect",
        help="show what each step of a run holds, and what was lost of it",
        description="Reads manifests and indices only, below a manager's, a step's or an item's "
        "directory.",
    )
    parser.add_argument("root", metavar="ROOT")
    parser.add_argument("--step", type=int, help="only this step, leaf by leaf")
    parser.add_argument("--item", help="only this item")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="draw bytes and error along the run"
    )
    parser.set_defaults(call=_inspect)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``lcjax bench NAME``."""
    from lcjax import bench

    parser = commands.add_parser("bench", help="measure lcjax beside what you would use instead")
    names = parser.add_subparsers(required=True, metavar="name")
    for name in bench.NAMES:
        module = bench.load(name)
        one = names.add_parser(name, help=module.HELP, description=module.__doc__)
        one.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows there")
        module.add_arguments(one)
        one.set_defaults(call=_bench, name=name, run=module.run)


def _bench(options: argparse.Namespace) -> int:
    """Runs ``lcjax bench NAME``."""
    from lcjax.bench import BenchError
    from lcjax.tables import show

    try:
        rows = options.run(options)
    except BenchError as error:
        print(f"lcjax bench {options.name}: {error}", file=sys.stderr)
        return 2
    show(options.name, rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    """Runs ``lcjax inspect``."""
    from lcjax import inspecting
    from lcjax.errors import LcjaxError
    from lcjax.tables import show

    try:
        steps = inspecting.inspect(options.root)
    except LcjaxError as error:
        print(f"lcjax inspect: {error}", file=sys.stderr)
        return 1
    chosen = [s for s in steps if options.item in (None, s.item)]
    chosen = [s for s in chosen if options.step in (None, s.step)]
    if not chosen:
        print(f"lcjax inspect: {options.root} has no such step or item", file=sys.stderr)
        return 1
    show(options.root, [s._asdict() for s in chosen], leave_out=("leaves",))
    for step in chosen if options.step is not None else ():
        rows = [
            leaf._asdict() | (leaf.lost or inspecting.NOTHING_LOST)._asdict()
            for leaf in step.leaves
        ]
        show(f"step {step.step} {step.item}", rows, leave_out=("lost", "left"))
    if options.json:
        text = json.dumps([inspecting.to_json(s) for s in chosen], indent=1)
        options.json.write_text(text + "\n")
    if options.plot:
        inspecting.picture(chosen, options.plot)
    return 0


def _demo(options: argparse.Namespace) -> int:
    """Runs ``lcjax demo``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lcjax import policy
    from lcjax.demo import report
    from lcjax.demo.process import TrainingError
    from lcjax.demo.run import TITLES, ForeignFolderError, run_demo, write_json
    from lcjax.demo.settings import Settings, quick
    from lcjax.errors import PresetError

    settings = Settings(preset=options.preset, bits=options.bits)
    if options.quick:
        settings = quick(settings)
    if options.steps is not None:
        settings = dataclasses.replace(settings, steps=options.steps)
    if settings.steps < 4 * settings.save_every:
        print(f"lcjax demo: --steps must be at least {4 * settings.save_every}", file=sys.stderr)
        return 2
    try:
        policy.resolve(settings.preset, settings.bits)
    except PresetError as error:
        print(f"lcjax demo: {error}", file=sys.stderr)
        return 2
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            tasks = {
                name: bars.add_task(title, total=settings.steps, start=False)
                for name, title in TITLES.items()
            }

            def progress(name: str, step: int) -> None:
                bars.start_task(tasks[name])
                bars.update(tasks[name], completed=step)
                if step == settings.steps:
                    bars.stop_task(tasks[name])

            result = run_demo(options.out, settings, progress)
    except ForeignFolderError as error:
        print(f"lcjax demo: {error}; name another folder with --out", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"lcjax demo: {error}", file=sys.stderr)
        return 1
    drawing = options.out / "demo.png"
    report.picture(result, drawing)
    if options.json:
        write_json(result, options.json)
    console.print(report.table(result), report.losses(result))
    console.print(f"{result.seconds:.0f} s; the picture is in {drawing}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
