"""From a user's file to a compiled pipeline: load, package, check against the categories there are."""

from __future__ import annotations

from pathlib import Path

from penstock.client import Client
from penstock.jobs.provision import cannot_run
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compiled import CompiledPipeline
from penstock.streams.packages import Package, build_package, load_pipeline
from penstock.streams.plan import compile_pipeline


def compile_file(path: Path, client: Client, *, version: str = "") -> tuple[CompiledPipeline, Package]:
    """Load the pipeline in this process (the control plane never does) and compile it."""
    pipeline = load_pipeline(path)
    package = build_package(path, pipeline.local_files, name=pipeline.name)
    catalogue = StaticCatalogue([category_from_json(item["spec"]) for item in client.categories()])
    return compile_pipeline(pipeline, catalogue, package.ref(version)), package


def check_can_run(compiled: CompiledPipeline) -> None:
    """Refuse before anything is sent what the control plane would refuse."""
    for job in compiled.jobs:
        refusal = cannot_run(job.name, job.to_json())
        if refusal is not None:
            raise refusal
