"""What the Python client asks about alarms and capacity."""

from __future__ import annotations

from typing import Any

from penstock.web.link import Json, Link, given, path_part


class AlarmQuestions:
    """Asks over a link."""

    _link: Link

    def alarms(self, *, job: str | None = None, everything: bool = False) -> Json:
        """Alarms that fire, or all that are kept: {alarms, routes}."""
        return self._about("/alarms", job=job, all=everything or None)

    def alarm(self, alarm_id: str) -> Json:
        """One alarm."""
        return self._about(f"/alarms/{path_part(alarm_id)}")

    def acknowledge_alarm(self, alarm_id: str, *, why: str, key: str) -> Json:
        """Say that somebody looks after it."""
        path = f"/alarms/{path_part(alarm_id)}/acknowledge"
        return self._link.json("POST", path, body={"why": why}, headers={"Idempotency-Key": key}, repeat=True)

    def silences(self) -> list[Json]:
        """Those that hold."""
        return list(self._about("/silences")["silences"])

    def silence_alarms(
        self, *, job: str, kind: str = "*", severity: str = "critical", for_s: int, why: str, key: str
    ) -> Json:
        """Tell nobody of such alarms for so long. `job` and `kind` may have `*`."""
        body = {"job": job, "kind": kind, "severity": severity, "for_s": for_s, "why": why}
        return self._link.json("POST", "/silences", body=body, headers={"Idempotency-Key": key}, repeat=True)

    def end_silence(self, silence_id: str, *, why: str, key: str) -> Json:
        """End a silence before its time."""
        path, headers = f"/silences/{path_part(silence_id)}", {"Idempotency-Key": key}
        return self._link.json("DELETE", path, params={"why": why}, headers=headers, repeat=True)

    def test_alarm_routes(self, *, why: str) -> list[Json]:
        """Send a notice through each route: [{route, is_taken, answer}]."""
        # Not repeated: whoever is told would be told twice.
        return list(self._link.json("POST", "/alarm-routes/test", body={"why": why})["routes"])

    def capacity(self) -> Json:
        """What the cluster has, and how much of it is reserved and used."""
        return self._about("/capacity")

    def _about(self, path: str, **params: Any) -> Json:
        return self._link.json("GET", path, params=given(params), repeat=True)
