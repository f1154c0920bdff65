"""Options of `penstock up` about those who watch over jobs: who is told, and how much they may do."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.settings import (
    ADVICE_ONLY_VARIABLE,
    ALARM_CHANNELS_VARIABLE,
    ALARM_WEBHOOK_VARIABLE,
    RESCALES_MAX,
    RESCALES_MAX_VARIABLE,
)

AlarmWebhook = Annotated[
    str,
    typer.Option(
        envvar=ALARM_WEBHOOK_VARIABLE, help="Where alarms are posted: https://…, or file:PATH with it."
    ),
]
AlarmChannels = Annotated[
    str,
    typer.Option(
        envvar=ALARM_CHANNELS_VARIABLE,
        help="Addresses that apprise knows, spaces between, or file:PATH with them.",
    ),
]
RescalesMax = Annotated[
    int,
    typer.Option(
        envvar=RESCALES_MAX_VARIABLE,
        help="Jobs whose number of tasks scaler and policies may change at a time.",
        min=0,
        max=RESCALES_MAX,
    ),
]
AdviceOnly = Annotated[
    bool,
    typer.Option(
        "--advice-only",
        envvar=ADVICE_ONLY_VARIABLE,
        help="Scaler and policies say what they would do with any job, and do nothing.",
    ),
]
