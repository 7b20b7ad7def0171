"""launch/jobset.yaml is a JobSet, and gives each pod a number of its own."""

import itertools
import json
from typing import Any

import pytest
import yaml

from lingvo_moe.core.job import launchers
from tools.import_graph import ROOT

_FILE = ROOT / "launch/jobset.yaml"
# The types in _FILE with all of their fields; * marks those that are required, and [] a list. From the definitions of
# JobSet's API v1alpha2 and of Kubernetes in kubeflow-trainer-api 2.3.0.
_TYPES = json.loads((ROOT / "tests/house/jobset_schema.json").read_text("utf-8"))
_PLAIN = {"string": str, "integer": int, "boolean": bool, "object": dict, "any": object}


def _mistakes(value: Any, kind: Any, path: str = "") -> list[str]:
    """The differences of a value from a type of _TYPES."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{path}: expected a list"]
        return [m for i, item in enumerate(value) for m in _mistakes(item, kind[0], f"{path}[{i}]")]
    if kind in _PLAIN:
        right = isinstance(value, _PLAIN[kind]) and (kind != "integer" or value is not True)
        return [] if right else [f"{path}: expected {kind}"]
    if not isinstance(value, dict):
        return [f"{path}: expected {kind}"]
    fields = {name.rstrip("*"): of for name, of in _TYPES[kind].items()}
    required = [name[:-1] for name in _TYPES[kind] if name.endswith("*")]
    return [f"{path}: lacks {name}" for name in required if name not in value] + [
        m
        for name, item in value.items()
        for m in (
            _mistakes(item, fields[name], f"{path}.{name}")
            if name in fields
            else [f"{path}: no field {name}"]
        )
    ]


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load(_FILE.read_text("utf-8"))


def test_it_has_the_fields_of_a_jobset(jobset):
    assert not _mistakes(jobset, "JobSet")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    workers = jobset["spec"]["replicatedJobs"][0]
    workers["replica"] = workers.pop("name")
    workers["template"]["spec"]["parallelism"] = "4"
    assert _mistakes(jobset, "JobSet") == [
        ".spec.replicatedJobs[0]: lacks name",
        ".spec.replicatedJobs[0].template.spec.parallelism: expected integer",
        ".spec.replicatedJobs[0]: no field replica",
    ]


def test_each_pod_has_a_number_and_the_coordinator_is_the_first(jobset):
    workers = jobset["spec"]["replicatedJobs"][0]
    job, replicas = workers["template"]["spec"], workers["replicas"]
    pods = job["parallelism"]
    assert job["completions"] == pods
    numbers = {}
    for index, pod in itertools.product(range(replicas), range(pods)):
        # As JobSet and Kubernetes would fill in.
        annotations = {"replicatedjob-replicas": replicas, "job-index": index, "coordinator": "a.b"}
        environ = {"JOB_COMPLETION_INDEX": str(pod)}
        for variable in job["template"]["spec"]["containers"][0]["env"]:
            if "value" not in variable:
                field = variable["valueFrom"]["fieldRef"]["fieldPath"]
                name = field.removeprefix("metadata.annotations['jobset.sigs.k8s.io/")
                variable = {**variable, "value": str(annotations[name.removesuffix("']")])}
            environ[variable["name"]] = variable["value"]
        found = launchers.find(environ)
        assert found is not None and found.count == replicas * pods
        numbers[found.number] = index, pod
    assert sorted(numbers) == list(range(replicas * pods))
    at = jobset["spec"]["coordinator"]
    assert numbers[0] == (at["jobIndex"], at["podIndex"]) and at["replicatedJob"] == workers["name"]
