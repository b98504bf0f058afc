# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The commands that compare and send reports: sweep, diff, bundle."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from mla_kernels.report.sweep import Cell, Ending, Sweep, SweepReporter, load_sweep, run_sweep

__all__ = ["COMMANDS"]

REPORTS = click.option(
    "--reports-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Where reports go. Default: reports/ in the checkout.",
)  # fmt: skip


class SweepTerminal(SweepReporter):
    """A line a cell, and one a minute while none ends."""

    def __init__(self, workers: int | None, address: str) -> None:
        self.where = f"cluster {address}" if address else f"{workers or 'all'} worker{'' if workers == 1 else 's'}"
        self.last = time.monotonic()

    def start(self, sweep: Sweep, folder: Path, reused: int, stale: Mapping[str, int]) -> None:
        click.echo(f"{len(sweep.cells)} cells of {sweep.notebook.name}, {self.where}, kernel: {sys.executable}")
        if reused:
            click.echo(f"  {reused} of an earlier run {'is' if reused == 1 else 'are'} taken over")
        for why, count in stale.items():
            click.echo(f"  {count} of an earlier run {'is' if count == 1 else 'are'} run again: {why}")

    def cell(self, cell: Cell, ending: Ending, done: int, of: int) -> None:
        self.last = time.monotonic()
        mark = click.style("✓", fg="green") if ending.finished else click.style("✗", fg="red")
        text = "" if ending.finished else f"  {ending.reason.splitlines()[0]}"
        click.echo(f"  [{done:{len(str(of))}}/{of}] {mark} {cell.label}  {ending.seconds:.1f} s{text}")

    def again(self, cell: Cell, reason: str, attempt: int) -> None:
        click.echo(f"  {cell.label}: {reason}; once more (attempt {attempt + 1})")

    def waiting(self, done: int, of: int) -> None:
        if time.monotonic() - self.last >= 60:
            self.last = time.monotonic()
            click.echo(f"  {done} of {of} cells have ended, {time.strftime('%H:%M')}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--name", metavar="NAME", help="Name of the sweep's folder. Default: that of the file.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N",
    help="Cells at once. Default: as many as there are cores (on a cluster: as it has room for).",
)  # fmt: skip
@click.option("--address", default="", metavar="HOST:PORT", help="Ray cluster to run on. Default: this machine.")
@click.option("--again", is_flag=True, help="Run cells again that failed in an earlier run.")
@REPORTS
def sweep(
    file: Path, name: str | None, workers: int | None, address: str, again: bool, reports_dir: Path | None
) -> None:
    """Run the parameter grid in FILE, and compare its cells on one page.

    Cells that an earlier run of this sweep has finished are not run again.
    """
    start = time.monotonic()
    plan = load_sweep(file)
    done = run_sweep(
        plan,
        name or file.stem,
        workers=workers,
        address=address,
        reports_dir=reports_dir,
        again=again,
        command=["python", "-m", "mla_kernels.report", *sys.argv[1:]],
        reporter=SweepTerminal(workers, address),
    )
    seconds = time.monotonic() - start
    if done.finished:
        click.echo(f"finished in {seconds:.0f} s: {done.folder / 'index.html'}")
        return
    left = sum(not ending.finished for ending in done.endings.values())
    click.echo(
        f"not finished ({left} of {len(done.endings)} cells): what there is: {done.folder / 'index.html'}", err=True
    )
    sys.exit(130 if done.interrupted else 1)


@click.command()
@click.argument("report", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="The file, or a folder for it. Default: REPORT.zip beside the report.",
)  # fmt: skip
def bundle(report: Path, output: Path | None) -> None:
    """Make one file of a finished report, to send.

    REPORT is the folder, or the name of one under reports/. Whoever gets the file unpacks it and opens index.html, or
    checks it with `verify FILE`.
    """
    from mla_kernels.report.share import bundle_report, find_report

    target = bundle_report(find_report(report), output)
    click.echo(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Folder of the page. Default: reports/diff-A-B.",
)  # fmt: skip
def diff(a: Path, b: Path, output: Path | None) -> None:
    """Show what moved from report A to report B, beyond the noise of repeated runs.

    A and B are folders, names of reports under reports/, or bundles. For values that do not repeat (times), both need
    `run --repeat 3` or more.
    """
    from mla_kernels.report.diff import compare_reports
    from mla_kernels.report.diff_page import percent, render_diff
    from mla_kernels.report.files import repository_root
    from mla_kernels.report.share import find_report, opened
    from mla_kernels.report.values import number_text

    with opened(find_report(a)) as one, opened(find_report(b)) as two:
        found = compare_reports(one, two)
        folder = output or repository_root() / "reports" / f"diff-{found.a['name']}-{found.b['name']}"
        page = render_diff(found, one, two, folder)
    moved = found.moved
    for value in moved[:10]:
        change = f"{number_text(value.a)} → {number_text(value.b)}  {percent(value.change)}"
        click.echo(f"  {value.notebook}: {value.path}  {change}")
    if len(moved) > 10:
        click.echo(f"  and {len(moved) - 10} more")
    for notebook, claim, old, new in found.claims:
        click.echo(f"  {notebook}: “{claim}” {old} in A, {new} in B")
    unjudged = f", {len(found.unjudged)} cannot be judged" if found.unjudged else ""
    click.echo(f"{len(moved)} of {len(found.values)} values moved{unjudged}: {page}")


COMMANDS = (sweep, bundle, diff)
