# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""`python -m mla_kernels.report`: run, sweep, verify, diff, bundle, list, schema.

Exit codes: 0 all is well; 1 a notebook or a cell failed, or `verify` found a difference; 2 bad input, nothing was run;
130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mla_kernels.report import cli_compare
from mla_kernels.report.errors import ReportError
from mla_kernels.report.execute import Outcome, Progress
from mla_kernels.report.files import repository_root
from mla_kernels.report.parameters import Notebook, describe, load_profile, notebooks_in
from mla_kernels.report.runner import TIME_LIMIT, Plan, Reporter, plan_run, run_report, state_of

__all__ = ["main"]


class Terminal(Reporter):
    """Progress for people: a bar on a terminal, a line a notebook (and one a minute) elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.minute = 0

    def start(self, plan: Plan, folder: Path) -> None:
        count = len(plan.notebooks)
        click.echo(f"{count} notebook{'' if count == 1 else 's'}, profile {plan.profile}, kernel: {sys.executable}")

    def notebook_start(self, notebook: Notebook) -> None:
        self.minute = 0
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=1,
                desc=notebook.name,
                unit="cell",
                leave=False,
                bar_format="{desc} {bar:24} {n_fmt}/{total_fmt} {elapsed}{postfix}",
            )

    def progress(self, notebook: Notebook, progress: Progress | None, seconds: float) -> None:
        if progress is None:
            return
        if self.bar is not None:
            self.bar.total, self.bar.n = progress.of, progress.index
            self.bar.set_postfix_str(progress.heading[:60], refresh=False)
            self.bar.refresh()
        elif seconds // 60 > self.minute:
            self.minute = int(seconds // 60)
            click.echo(f"  {notebook.name}: {self.minute} min, {progress}")

    def notebook_end(self, notebook: Notebook, outcome: Outcome) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if outcome.finished:
            click.echo(f"  {click.style('✓', fg='green')} {notebook.name}  {outcome.seconds:.1f} s")
            return
        click.echo(f"  {click.style('✗', fg='red')} {notebook.name}  {outcome.seconds:.1f} s  {outcome.reason}")
        if outcome.cell:
            click.echo(f"    in {outcome.cell}")


class _Group(click.Group):
    """Turns the errors that a user can act on into a line without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ReportError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except OSError as error:
            place = f" {error.filename}" if error.filename else ""
            click.echo(f"Error: cannot read or write{place}: {error.strerror or error}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Run the notebooks without a person, and check reports."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite end keeps the partial notebook, as Ctrl-C does


PROFILE = click.option(
    "--profile", "--params", "profile", default="auto", show_default=True, metavar="NAME|FILE",
    help="Parameter values: smoke, cpu, h200, auto (h200 where its GPU is, else cpu), or a YAML file.",
)  # fmt: skip
PARAMETERS = click.option(
    "-p", "parameters", multiple=True, metavar="NAME=VALUE",
    help="Set a parameter in every notebook that has it, or in one: NOTEBOOK.NAME=VALUE. May be repeated.",
)  # fmt: skip
REPORTS = click.option(
    "--reports-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Where reports go. Default: reports/ in the checkout.",
)  # fmt: skip
LIMIT = click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), default=TIME_LIMIT, show_default=True,
    metavar="SECONDS", help="Wall clock for each notebook.",
)  # fmt: skip


@main.command()
@click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...")
@click.option("--name", default="report", show_default=True, help="Name of the report's folder.")
@PROFILE
@PARAMETERS
@REPORTS
@LIMIT
@click.option("--fail-fast", is_flag=True, help="Stop at the first notebook that fails.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="Run each notebook N times; `diff` takes the noise from it.",
)  # fmt: skip
def run(
    notebooks: tuple[str, ...],
    name: str,
    profile: str,
    parameters: tuple[str, ...],
    reports_dir: Path | None,
    time_limit: float,
    fail_fast: bool,
    repeat: int,
) -> None:
    """Run notebooks and write a report.

    NOTEBOOK is a name (02_error_distribution), a number (02) or a path; default: those that the profile lists.
    """
    start = time.monotonic()
    plan = dataclasses.replace(plan_run(notebooks, profile=profile, parameters=parameters), repeat=repeat)
    command = ["python", "-m", "mla_kernels.report", *sys.argv[1:]]
    done = run_report(
        plan,
        name,
        reports_dir=reports_dir,
        time_limit=time_limit,
        fail_fast=fail_fast,
        command=command,
        reporter=Terminal(),
    )
    seconds = time.monotonic() - start
    if done.finished:
        click.echo(f"finished in {seconds:.0f} s: {done.folder / 'index.html'}")
        return
    failed = [outcome.notebook for outcome in done.outcomes if not outcome.finished]
    click.echo(f"not finished ({', '.join(failed)}): what there is: {done.folder / 'index.html'}", err=True)
    sys.exit(130 if done.interrupted else 1)


@main.command()
@click.argument("report", type=click.Path(path_type=Path))
@LIMIT
def verify(report: Path, time_limit: float) -> None:
    """Run a report again from its manifest, compare every number, and say why some differ.

    REPORT is the folder, the name of one under reports/, or a bundle.
    """
    from mla_kernels.report.share import find_report, opened
    from mla_kernels.report.verify import unfinished_beside, verify_report

    report = find_report(report)
    if report.exists() and (other := unfinished_beside(report)):
        click.echo(f"note: {other} lies beside it and {state_of(other)}", err=True)
    with opened(report) as folder:
        result = verify_report(folder, time_limit=time_limit, reporter=Terminal())
    if result.alike:
        click.echo(f"\nThe same as in the report: {', '.join(result.alike)}")
    if result.environment:
        click.echo("\nThis environment is not the one of the report:")
        click.echo(_table(("what", "recorded", "now"), _main_rows(result.environment)))
    if result.differences:
        click.echo(f"\n{len(result.differences)} of {result.compared} entries of results.json differ:")
        rows = [(d.path, _leaf(d.recorded), _leaf(d.now), _relative(d.recorded, d.now)) for d in result.differences]
        click.echo(_table(("path", "recorded", "now", "relative"), rows))
        click.echo(f"\nWhy, as far as the manifests tell: {result.cause}")
    if result.same:
        click.echo(f"verified: {result.compared} entries of {report / 'results.json'} are identical")
    else:
        what = f"{', '.join(result.unfinished)} did not finish" if result.unfinished else "the numbers differ"
        click.echo(f"not verified: {what}", err=True)
        sys.exit(130 if result.interrupted else 1)


def _main_rows(rows: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Without the packages that no number depends on, if many differ; how many there are is said."""
    from mla_kernels.report.provenance import MAIN_PACKAGES

    others = [row for row in rows if row[0].startswith("package ") and row[0][8:] not in MAIN_PACKAGES]
    if len(others) <= 10:
        return list(rows)
    return [row for row in rows if row not in others] + [(f"{len(others)} other packages", "", "")]


def _leaf(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _relative(a: Any, b: Any) -> str:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    return f"{abs(a - b) / abs(a):.1e}" if numbers and a else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


@main.command("list")
@REPORTS
def list_command(reports_dir: Path | None) -> None:
    """List the notebooks, the profiles and the reports that are there."""
    root = repository_root()
    click.echo("notebooks")
    for notebook in notebooks_in(root / "notebooks"):
        click.echo(f"  {notebook.name:24} {notebook.title}")
    click.echo("profiles")
    for path in sorted((root / "notebooks" / "params").glob("*.yaml")):
        click.echo(f"  {path.stem:24} {', '.join(load_profile(path.stem, root / 'notebooks'))}")
    click.echo("reports")
    reports = reports_dir or root / "reports"
    for folder in sorted(path.parent for path in reports.glob("*/manifest.json")):
        click.echo(f"  {folder.name:24} {state_of(folder) or 'is finished'}")


@main.command()
@click.argument("notebook")
@PROFILE
@PARAMETERS
@click.option("--json", "as_json", is_flag=True, help="Print the values as JSON, as papermill takes them.")
def schema(notebook: str, profile: str, parameters: tuple[str, ...], as_json: bool) -> None:
    """Show what a notebook's parameters are, may be, and would be in a run."""
    plan = plan_run([notebook], profile=profile, parameters=parameters)
    chosen = plan.notebooks[0]
    values = plan.parameters[chosen.name]
    if as_json:
        click.echo(json.dumps(values))
        return
    click.echo(f"{chosen.name}: {chosen.title}\n")
    for name, entry in chosen.schema.items():
        click.echo(f"{name} = {json.dumps(values[name])}")
        click.echo(f"    {describe(entry)}")
        if entry.get("description"):
            click.echo(click.wrap_text(entry["description"], 100, "    ", "    "))


for _command in cli_compare.COMMANDS:
    main.add_command(_command)
