"""The API against its own description: whatever is sent, the answer is documented, and bad input is refused.

Schemathesis makes requests from the OpenAPI description, good ones and broken ones: 10 of each per operation
here, 100 with `make fuzz` (FUZZ_EXAMPLES), there also on PostgreSQL (FUZZ_STORE). Every answer must have a
documented status and body, none may be a 5xx, and what breaks the description must not be accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import structlog
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from penstock.core.errors import PenstockError
from penstock.db.tokens import ROLES
from penstock.server.api import PREFIX
from tests.builders import ADMIN, a_body
from tests.server.served import Served, served
from tests.server.test_access import ROUTES
from tests.server.world import JOB
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

# A package is bytes: they are sent as they are.
schemathesis.serializer.alias("application/zip", "application/octet-stream")

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
ON_POSTGRES = os.environ.get("FUZZ_STORE") == "postgres"
# Good requests are often refused for what they mean (no such job, not a valid config): that all of them are
# accepted is no claim. That broken ones are not is.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
    ignored_auth,
]
REFUSALS = [400, 401, 403, 404, 405, 409, 413, 422, 428, 429, 431]
OPERATIONS = [(method, path) for method, path, _, _ in ROUTES if path != "/openapi.json"] + [
    ("GET", "/health")
]
# Operations that take nothing: there is no broken request to them.
WITHOUT_INPUT = {"/health", "/status", "/categories", "/layers", "/tokens", "/silences", "/capacity"}
every_operation = pytest.mark.parametrize(
    ("method", "path"), OPERATIONS, ids=[" ".join(o) for o in OPERATIONS]
)

# Mostly as somebody who gets far.
callers = st.sampled_from(["admin"] * 6 + sorted(ROLES))


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    database = request.getfixturevalue("postgres").new_database() if ON_POSTGRES else ""
    with served(tmp_path_factory.mktemp("fuzz") / "plane", database=database) as world:
        yield world
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def description(world: Served) -> Any:
    refused = {"negative_data_rejection": {"expected-statuses": REFUSALS}}
    config = SchemathesisConfig.from_dict({"checks": refused})
    with world.client() as client:
        return schemathesis.openapi.from_dict(client._link.json("GET", "/openapi.json"), config=config)


def fuzz(world: Served, operation: Any, mode: GenerationMode) -> None:
    """Draw requests, send them, check the answers."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=EXAMPLES == 10,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), callers, st.booleans())
    def run(case: Any, role: str, is_known: bool) -> None:
        ensure_job(world)
        if mode is GenerationMode.POSITIVE:
            aim(case, is_known)
        elif isinstance(case.query, dict):
            # In a URL a list of one value is that value, an empty one is nothing: no broken request.
            assume(not any(isinstance(value, list) and len(value) <= 1 for value in case.query.values()))
        if case.operation.path.endswith(("/events", "/tasks")) and isinstance(case.query, dict):
            case.query.setdefault("wait_s", 0)  # not to wait for news
            if mode is GenerationMode.POSITIVE:
                case.query["wait_s"] = 0
        headers = {"Authorization": f"Bearer {world.tokens[role]}"}
        case.call_and_validate(base_url=world.server.url, headers=headers, checks=CHECKS, timeout=LIMIT_S)

    run()


def aim(case: Any, is_known: bool) -> None:
    """Half of the good requests are about what is there, so that they get beyond "not found"."""
    if is_known and "name" in (case.path_parameters or {}) and "/jobs/" in case.path:
        case.path_parameters["name"] = JOB
        if "layer" in case.path_parameters:
            case.path_parameters["layer"] = "oncall"


def ensure_job(world: Served) -> None:
    """There is one job to talk about, whatever was done to it before."""
    try:
        world.plane.jobs.view(JOB)
    except PenstockError:
        asked = {"actor": ADMIN, "reason": "again", "idempotency_key": None, "now_ms": 1}
        world.plane.jobs.apply(JOB, a_body(JOB), expected_version=None, birth=os.urandom(4).hex(), **asked)  # type: ignore[arg-type]


@every_operation
def test_good_requests_get_documented_answers(world: Served, description: Any, method: str, path: str):
    fuzz(world, description[PREFIX + path][method], GenerationMode.POSITIVE)


@every_operation
def test_broken_requests_are_refused(world: Served, description: Any, method: str, path: str):
    if path in WITHOUT_INPUT and method == "GET":
        pytest.skip("it takes nothing that could be broken")
    fuzz(world, description[PREFIX + path][method], GenerationMode.NEGATIVE)
