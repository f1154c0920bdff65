"""How one installation runs: what its control plane is given, and what its containers are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError
from penstock.tasks.sharding import SHARD_COUNT

DATABASE_VARIABLE = "PENSTOCK_DATABASE"
BUS_VARIABLE = "PENSTOCK_BUS"
ROWS_VARIABLE = "PENSTOCK_ROWS"
ALARM_WEBHOOK_VARIABLE = "PENSTOCK_ALARM_WEBHOOK"
ALARM_CHANNELS_VARIABLE = "PENSTOCK_ALARM_CHANNELS"
RESCALES_MAX_VARIABLE = "PENSTOCK_RESCALES_MAX"
ADVICE_ONLY_VARIABLE = "PENSTOCK_ADVICE_ONLY"
RESCALES_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one embedded installation runs."""

    folder: Path
    database: str = ""  # the URL of a PostgreSQL database; "": a SQLite file in the folder
    bus_place: str = ""  # kafka://<host>:<port>/<prefix>; "": an embedded log in the folder
    rows_place: str = ""  # postgresql://…; "": SQLite files in the folder
    profile: str = "fast"
    shards: int = SHARD_COUNT
    sync_ms: Millis = 500  # the paper's 30 s sweep is for tens of thousands of jobs
    sync_gap_ms: Millis = 200  # changes of so long are looked at together
    shard_ms: Millis = 500
    scaler_ms: Millis = 1_000
    metrics_ms: Millis = 5_000
    policies_ms: Millis = 1_000
    rescales_max: int = 10  # jobs whose tasks scaler and policies may deal anew at a time
    advice_only: bool = False  # scaler and policies say what they would do, and do nothing
    bus_ms: Millis = 500
    clean_ms: Millis = 60_000  # how often the bus is searched for what dead publishers left
    clean_after_ms: Millis = 600_000
    alarms_ms: Millis = 1_000
    alarm_webhook: str = field(default="", repr=False)  # https://…, or file:<path> that holds it
    alarm_channels: str = field(default="", repr=False)  # addresses that apprise knows, or file:<path>
    capacity_ms: Millis = 5_000
    capacity_patience_ms: Millis = 120_000  # so long it is short before a job stops for it
    lease_ms: Millis = 5_000  # how long a control plane that fell silent stays the active one

    def __post_init__(self) -> None:
        if not 0 <= self.rescales_max <= RESCALES_MAX:
            raise ConfigError(
                f"{self.rescales_max} rescales at a time cannot be",
                why=f"the fleet's cap is 0 to {RESCALES_MAX}; with 0 no number of tasks is changed",
                fix=f"give --rescales-max or {RESCALES_MAX_VARIABLE} in that range",
            )

    @property
    def store(self) -> str:
        """Where containers find the store when no control plane answers."""
        return f"env:{DATABASE_VARIABLE}" if self.database else str(self.folder / "store.db")

    @property
    def bus(self) -> str:
        """Where the streams lie."""
        return self.bus_place or f"embedded:{self.folder / 'bus'}"

    @property
    def rows(self) -> str:
        """Where state lies."""
        return self.rows_place or f"sqlite:{self.folder / 'rows'}"

    @property
    def told_rows(self) -> str:
        """Where containers find the state; an address with a password is not in a list of processes."""
        return self.rows if self.rows.startswith("sqlite:") else f"env:{ROWS_VARIABLE}"
