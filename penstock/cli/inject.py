"""`penstock inject`: files that grow, line by line, onto the bus, with a low watermark of their own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.bus import Bus, described, find_bus
from penstock.cli.connection import FOLDER, Folder
from penstock.cli.output import Form, Output, err, show
from penstock.cli.stopping import until_ctrl_c
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.file_injector import FileInjector, find_files
from penstock.streams.held_back import moment
from penstock.streams.injector import dismiss_injector, expect_injectors
from penstock.streams.record_lines import LineRules
from penstock.streams.skew import Skew, SkewLimit

FOLLOW_MS: Millis = 300


def inject(
    category: Annotated[str, typer.Option("--category", help="Where the lines go.")],
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of lines, or folders of such files.", exists=True)
    ] = None,
    folder: Folder = FOLDER,
    bus: Bus = "",
    name: Annotated[str, typer.Option(help="This process among the injectors of the category.")] = "files",
    key: Annotated[str, typer.Option(help="The column that is the key; none: records have no key.")] = "",
    ts: Annotated[
        str, typer.Option(help="The column with the event time in ms; none: the category's, else now.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    done: Annotated[
        bool, typer.Option("--done", help="Nothing more comes from this process: let the watermark pass.")
    ] = False,
    expect: Annotated[str, typer.Option(help="All processes that the watermark waits for: name,name …")] = "",
    dismiss: Annotated[
        str, typer.Option(help="Wait no longer for this process, which comes no more; injects nothing.")
    ] = "",
    skew_max_ms: Annotated[
        int, typer.Option(help="Wait while the lines are so far ahead of --paced-by; 0: never.", min=0)
    ] = 0,
    paced_by: Annotated[str, typer.Option(help="What the consumers write: category,category …")] = "",
    output: Output = Form.TABLE,
) -> None:
    """Publish the lines of files, once each, also after a crash; with -f what is appended to them."""
    log, clock = find_bus(folder, bus), SystemClock()
    spec = described(log, category).spec
    if dismiss:
        dismiss_injector(log, category, dismiss, now_ms=clock.now_ms())
        show({"dismissed": dismiss}, output, lambda: f"{category} waits for {dismiss} no longer")
        return
    if not files:
        raise ConfigError("no files", why="nothing was given to inject", fix="name files or folders")
    if follow and done:
        raise ConfigError(
            "--done and --follow do not go together", why="who follows expects more", fix="give one of them"
        )
    if expect:
        expect_injectors(log, category, [item.strip() for item in expect.split(",") if item.strip()])
    limit = None
    if skew_max_ms or paced_by:
        others = [item.strip() for item in paced_by.split(",") if item.strip()]
        for other in others:
            described(log, other)
        limit = SkewLimit(log, skew_max_ms=skew_max_ms, paced_by=others, on_wait=_Told().say)
    rules = LineRules(spec=spec, key_column=key, ts_column=ts)
    injector = FileInjector(log, rules, name, epoch=clock.now_ms(), limit=limit)
    sent = 0
    # Ctrl-C ends the following; the watermark is held until somebody goes on.
    with until_ctrl_c() if follow else contextlib.nullcontext():
        while follow:
            found = injector.round(find_files(files), now_ms=clock.now_ms())
            sent += found
            if not found:
                sleep_ms(FOLLOW_MS)
        sent = injector.round(find_files(files), now_ms=clock.now_ms(), is_last=True)
    if done:
        injector.close(now_ms=clock.now_ms())
    show({"category": category, "sent": sent}, output, lambda: f"{sent:,} lines to {category}")


class _Told:
    """Says that it waits, once for each time."""

    def __init__(self) -> None:
        self._said: Millis | None = None

    def say(self, skew: Skew) -> None:
        if self._said != skew.low:
            self._said = skew.low
            err.print(
                f"waits: {skew.spread_ms / 1000:,.1f} s ahead of {skew.category}, which is at "
                f"{moment(skew.slowest)}",
                markup=False,
            )
