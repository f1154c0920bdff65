"""The settings of an installation and of a joining container, from a file, the environment and options.

Precedence, lowest first: the default here, the file `penstock.toml`, the variable `PENSTOCK_<NAME>`, the
option. Fields with a description can be set in all three; the others are for tests and benchmarks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.core.text import did_you_mean
from penstock.fleet.messages import PROFILES
from penstock.fleet.shard_load import SHARD_COUNT

FOLDER = Path(".penstock")
FILE = "penstock.toml"
PREFIX = "PENSTOCK_"
DATABASE_VARIABLE, BUS_VARIABLE, ROWS_VARIABLE = "PENSTOCK_DATABASE", "PENSTOCK_BUS", "PENSTOCK_ROWS"
# `spark` also runs plain processes; `process` runs only those and needs no JVM.
ENGINES = ("spark", "process")


class _Sourced(BaseSettings):
    """Base of settings: `read` uses file, environment and options; the constructor uses only its
    arguments.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX, env_ignore_empty=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("engine", check_fields=False)
    @classmethod
    def _known_engine(cls, value: str) -> str:
        return _one_of(ENGINES, value)

    @field_validator("profile", check_fields=False)
    @classmethod
    def _known_profile(cls, value: str) -> str:
        return _one_of(tuple(PROFILES), value)

    @classmethod
    def read(cls, options: Mapping[str, Any], *, file: Path | None, **fixed: Any) -> Self:
        """Read the settings of a command. `options` are those that were given; a `file` must exist.

        `fixed` are fields that no source may set, e.g. the folder of the file.
        """
        values: dict[str, Any] = {}
        names: dict[str, str] = {}  # by field: its name in messages, as in the source that set it
        known = {name for name, field in cls.model_fields.items() if field.description} - {*fixed}
        for name, value in _read_file(file, known).items():
            values[name], names[name] = value, f"{name} in {file}"
        for name, value in EnvSettingsSource(cls)().items():
            if name in known:
                values[name], names[name] = value, f"{PREFIX}{name.upper()}"
        for name, value in options.items():
            values[name], names[name] = value, f"--{name.replace('_', '-')}"
        try:
            return cls(**values, **fixed)
        except ValidationError as error:
            raise _refusal(cls, error, names) from None


def _one_of(known: tuple[str, ...], value: str) -> str:
    if value not in known:
        raise ValueError(f"unknown value {value[:100]!r}; use {' or '.join(known)}")
    return value


def _read_file(file: Path | None, known: set[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read the settings in {file}",
            why=error.strerror or str(error),
            fix="name an existing file with --config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML", why=str(error), fix="e.g. containers = 3") from error
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{name} in {file} is not a setting",
                why=f"known settings: {', '.join(sorted(known))}",
                fix=did_you_mean(name, known, otherwise="remove it"),
            )
    return found


def _refusal(cls: type[_Sourced], error: ValidationError, names: Mapping[str, str]) -> ConfigError:
    """The error for invalid values, by source; values of secrets are not shown."""
    complaints = {}
    for item in error.errors():
        name = str(item["loc"][0])
        shown = f"{item['input']!r}"[:100] if cls.model_fields[name].repr else "the value"
        custom = item["type"] == "value_error"
        complaints[names.get(name, name)] = str(item["ctx"]["error"]) if custom else f"{shown}: {item['msg']}"
    return ConfigError(
        f"{', '.join(complaints)} cannot be used",
        why="; ".join(f"{name}: {why}" if len(complaints) > 1 else why for name, why in complaints.items()),
        fix="change or remove the value there; options override the environment, which overrides the file",
    )


class Settings(_Sourced):
    """How one installation runs: its control plane, its API and its containers on this machine."""

    folder: Path = Field(description="The folder for all data.")
    containers: int = Field(2, ge=0, le=64, description="How many containers to run.")
    port: int = Field(7337, ge=0, le=65535, description="Port to listen on (0: any free one).")
    host: str = Field("127.0.0.1", description="Address to listen on; beyond loopback only with TLS.")
    tls_cert: Path | None = Field(None, description="Certificate in PEM, with its chain.")
    tls_key: Path | None = Field(None, description="Its key in PEM, unencrypted.")
    tls_ca: Path | None = Field(
        None, description="CA file for clients on this machine; none: the certificate itself."
    )
    name: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="A host name in the certificate that clients use; several: repeat it."
    )
    database: str = Field("", repr=False, description="URL of a PostgreSQL database; none: a SQLite file.")
    bus: str = Field("", description="Where streams are stored: kafka://host:port/prefix; none: the disk.")
    rows: str = Field(
        "", repr=False, description="Where state is stored: postgresql://…; none: the folder's disk."
    )
    engine: str = Field(
        "spark", description="What containers run: spark (and processes), or process (no Java)."
    )
    cores: int = Field(2, ge=1, description="Spark threads per container.")
    master: str = Field(
        "", description="Another Spark cluster for tasks, e.g. spark://host:7077; none: in each container."
    )
    profile: str = Field("fast", description="Heartbeat times: fast (8 s / 12 s) or paper (40 s / 60 s).")
    workers: int = Field(2, ge=1, le=64, description="Processes that serve the API.")
    control_port: int = Field(
        0, ge=0, le=65535, description="Port for containers' heartbeats; 0: any free one."
    )
    control_url: str = Field(
        "",
        description="How containers reach that port, e.g. https://HOST:PORT; none: at the API's host.",
    )
    alarm_webhook: str = Field(
        "",
        repr=False,
        description="URL to which alarms are posted: https://…, or file:PATH of a file with it.",
    )
    alarm_channels: str = Field(
        "",
        repr=False,
        description="Addresses for apprise, separated by spaces, or file:PATH of a file with them.",
    )
    rescales_max: int = Field(
        10,
        ge=0,
        le=100_000,
        description="How many jobs the scaler and policies may rescale at the same time.",
    )
    advice_only: bool = Field(
        False, description="Scaler and policies only report what they would do, for all jobs."
    )

    shards: int = SHARD_COUNT
    sync_ms: Millis = 500  # the paper's 30 s round is for tens of thousands of jobs
    sync_gap_ms: Millis = 200  # changes within this time are synced together
    shard_ms: Millis = 500
    scaler_ms: Millis = 1_000
    metrics_ms: Millis = 5_000
    policies_ms: Millis = 1_000
    bus_ms: Millis = 500
    clean_ms: Millis = 60_000  # how often files of dead publishers are cleaned up
    clean_after_ms: Millis = 600_000
    alarms_ms: Millis = 1_000
    capacity_ms: Millis = 5_000
    capacity_patience_ms: Millis = 120_000  # how long capacity is short before a job stops for it
    lease_ms: Millis = 5_000  # when the lease of the active control plane expires

    @field_validator("name", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return value.split() if isinstance(value, str) else value

    @classmethod
    def of_up(cls, options: Mapping[str, Any], *, config: Path | None) -> Self:
        """Read the settings of `penstock up`; the file is `config`, or the one in the folder."""
        given = dict(options)
        folder = Path(given.pop("folder", FOLDER)).absolute()
        return cls.read(given, file=_file_of(folder, config), folder=folder)

    @property
    def store(self) -> str:
        """The store's address for containers, used when no control plane answers."""
        return f"env:{DATABASE_VARIABLE}" if self.database else str(self.folder / "store.db")

    @property
    def bus_place(self) -> str:
        """The address of the bus; the default is an embedded log in the folder."""
        return self.bus or f"embedded:{self.folder / 'bus'}"

    @property
    def rows_place(self) -> str:
        """The address of the row store; the default is SQLite files in the folder."""
        return self.rows or f"sqlite:{self.folder / 'rows'}"

    @property
    def rows_argument(self) -> str:
        """The row store's address in containers' arguments, which all users can see: without a password."""
        return self.rows_place if self.rows_place.startswith("sqlite:") else f"env:{ROWS_VARIABLE}"

    @property
    def verify_with(self) -> Path | None:
        """The CA file for clients on this machine; a self-signed certificate is its own CA."""
        if self.tls_cert is None:
            return None
        return (self.tls_ca or self.tls_cert).absolute()


class JoinSettings(_Sourced):
    """Settings of a container that joins another machine's control plane (`penstock container --join`)."""

    engine: str = Field(
        "process",
        description="What it runs: process (no Java), or spark (needs access to bus and row store).",
    )
    cores: int = Field(2, ge=1, description="Spark threads.")
    capacity: str = Field("", description="cpu,memory_mb,disk_mb,network_mbps; none: not limited.")
    region: str = Field("", description="Where it is, for placement.")
    bus: str = Field("", description="The bus address from this machine; none: that of the control plane.")
    rows: str = Field(
        "", repr=False, description="The row store's address, if it is not on the disk; for Spark tasks."
    )

    @classmethod
    def of_join(cls, options: Mapping[str, Any], *, folder: Path, config: Path | None) -> Self:
        """Read the settings of a joining container; the file is `config`, or the one in its folder."""
        return cls.read(options, file=_file_of(folder, config))


def _file_of(folder: Path, config: Path | None) -> Path | None:
    if config is not None:
        return config
    file = folder / FILE
    return file if file.is_file() else None
