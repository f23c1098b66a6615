"""If this fails, a file for Kubernetes or SkyPilot is refused there, trains the wrong point, or breaks at a quote."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rung.sweep.emit import kubernetes, label, skypilot
from rung.sweep.space import Point, Sweep
from tests.errors import raises_code

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
KEYS = ("20541e700182", "000000000012", "deadbeef0000")  # the first is a number with an exponent, to some readers


class Yaml12(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does, and so Kubernetes: with an exponent and without a dot."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?"), list("-+.0123456789")
)


def made(runs: str = "/mnt/runs", name: str = "study", ranks: int = 1, **launch: Any) -> Sweep:
    points = tuple(Point(key, (f"seed={i}", 'note=it\'s "so" $HOME'), {"seed": i}) for i, key in enumerate(KEYS))
    folder = Path(runs, ".sweeps", name)
    return Sweep(name, folder, Path(runs), "piano", name, points, ranks=ranks, launch={"image": "lab/rung:1", **launch})


def job_of(sweep: Sweep) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(kubernetes(sweep, sweep.points), Yaml12)
    return found


def sky_of(sweep: Sweep) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(skypilot(sweep, sweep.points), Yaml12)
    return found


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A PATH with a `rung` that only says what it was called with."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "rung").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (folder / "rung").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def called(command: list[str], env: dict[str, str]) -> list[str]:
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    return [os.fsdecode(one) for one in done.stdout.split(b"\0")[:-1]]


def expanded(words: list[str], env: dict[str, str]) -> list[str]:
    """What Kubernetes makes of $(NAME) and $$ in a container's command."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", one, word) for word in words]


def test_the_job_is_one_that_kubernetes_takes() -> None:
    """The rules of batch/v1 that the parts of this file must keep among each other."""
    job = job_of(made(gpus=True, mem_gb=1.5, threads=4, array_parallelism=2))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert (spec["completions"], spec["parallelism"]) == (3, 2)
    assert pod["restartPolicy"] == "Never"  # wanted by podFailurePolicy and by backoffLimitPerIndex
    assert isinstance(spec["backoffLimitPerIndex"], int)
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "1536Mi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "1536Mi", "nvidia.com/gpu": "1"},  # GPUs: equal, or left out on one side
    }
    assert all(isinstance(one["value"], str) for one in container["env"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(value, str) for value in job["metadata"]["labels"].values())
    for rule in spec["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        assert rule.get("onExitCodes", {}).get("containerName", "point") == container["name"]
        assert 0 not in rule.get("onExitCodes", {}).get("values", [])
        assert all(one["status"] == "True" for one in rule.get("onPodConditions", []))


def test_what_an_exit_code_means_is_said_to_kubernetes() -> None:
    rules = job_of(made())["spec"]["podFailurePolicy"]["rules"]
    by_code = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert by_code == {3: "Ignore", 1: "FailIndex"}  # stopped: again, and not counted; failed: this point alone


@given(name=st.text(min_size=1, max_size=80), num=st.sampled_from([1, 2, 10, 11, 101]))
def test_names_keep_the_rules_of_rfc_1123(name: str, num: int) -> None:
    points = tuple(Point(f"{i:012x}", (), {}) for i in range(num))
    sweep = dataclasses.replace(made(), name=name, points=points)
    job = yaml.safe_load(kubernetes(sweep, points[:1]) if num == 1 else kubernetes(sweep, points))
    last_pod = f"{job['metadata']['name']}-{num - 1}"
    assert LABEL.fullmatch(last_pod)
    assert len(last_pod) <= 63
    assert all(re.fullmatch(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]", value)
               for value in job["metadata"]["labels"].values())  # fmt: skip


@given(first=st.text(min_size=1, max_size=90), second=st.text(min_size=1, max_size=90))
def test_different_names_stay_different(first: str, second: str) -> None:
    assert (label(first, 40) == label(second, 40)) == (first == second)


ODD = [
    "/mnt/my runs",
    "/mnt/it's",
    '/mnt/"q"',
    "/mnt/$(HOME)/$$x/$HOME",
    "/mnt/`id`;a&b",
    "/mnt/#no - yes",
    "/mnt/ü\\n",
]


@pytest.mark.parametrize("runs", ODD)
def test_each_index_starts_its_own_point_whatever_the_folder_is_called(runs: str, fake: dict[str, str]) -> None:
    sweep = made(runs)
    (container,) = job_of(sweep)["spec"]["template"]["spec"]["containers"]
    assert container["volumeMounts"][0]["mountPath"] == runs
    for index, key in enumerate(KEYS):
        env = {**fake, "JOB_COMPLETION_INDEX": str(index)}
        assert called(expanded(container["command"], env), env) == ["sweep", "point", f"{runs}/.sweeps/study", key]


@pytest.mark.parametrize("runs", ODD)
def test_a_task_starts_the_point_it_is_given(runs: str, fake: dict[str, str]) -> None:
    task = sky_of(made(runs, claim="s3://lab/runs"))
    assert task["file_mounts"] == {runs: {"source": "s3://lab/runs", "mode": "MOUNT_CACHED"}}
    for key in KEYS:
        env = {**fake, "POINT": key}
        assert called(["bash", "-c", task["run"]], env) == ["sweep", "point", f"{runs}/.sweeps/study", key]


def test_the_head_of_a_task_launches_every_point() -> None:
    sweep = made(claim="s3://lab/runs")
    head = "\n".join(one[2:] for one in skypilot(sweep, sweep.points).splitlines() if one.startswith("#"))
    loop = head[head.index("  for ") :].replace("sky jobs launch", "echo")
    said = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [re.search(r"POINT=(\w+)", one)[1] for one in said] == list(KEYS)  # type: ignore[index]


def test_a_task_asks_for_what_its_points_need() -> None:
    task = sky_of(made(claim="gs://lab/runs", gpus=True, ranks=2, accelerators="H100", threads=4, mem_gb=32))
    assert task["resources"] == {
        "cpus": "8+",
        "memory": "32+",
        "accelerators": "H100:2",
        "image_id": "docker:lab/rung:1",
        "job_recovery": {"recover_on_exit_codes": [3]},
    }
    assert task["num_nodes"] == 1
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert task["envs"]["POINT"] == KEYS[0]
    assert sky_of(made(claim="gs://a", setup=["pip install -e ."]))["setup"] == "pip install -e .\n"


def test_the_folder_may_lie_elsewhere_in_the_cluster(fake: dict[str, str]) -> None:
    (container,) = job_of(made(mount="/runs"))["spec"]["template"]["spec"]["containers"]
    env = {**fake, "JOB_COMPLETION_INDEX": "0"}
    assert called(expanded(container["command"], env), env)[2] == "/runs/.sweeps/study"


def test_points_that_are_left_out_are_not_started(fake: dict[str, str]) -> None:
    sweep = made()
    job = yaml.load(kubernetes(sweep, sweep.points[1:]), Yaml12)
    assert job["spec"]["completions"] == 2
    env = {**fake, "JOB_COMPLETION_INDEX": "1"}
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert called(expanded(command, env), env)[-1] == KEYS[2]


@pytest.mark.parametrize(
    ("launch", "code"),
    [
        ({"image": None}, "missing-option"),
        ({"claim": "Not a name"}, "bad-name"),
        ({"threads": 0}, "bad-value"),
        ({"mem_gb": "much"}, "bad-value"),
        ({"mount": "runs"}, "bad-value"),
        ({"image": "a\nb: c"}, "bad-value"),
    ],
)
def test_what_cannot_be_written_is_refused(launch: dict[str, Any], code: str) -> None:
    with raises_code(code):
        kubernetes(made(**launch), made().points)


def test_skypilot_is_told_where_the_runs_lie_and_what_the_gpus_are_called() -> None:
    with raises_code("missing-option"):
        skypilot(made(), made().points)
    with raises_code("missing-option"):
        skypilot(made(claim="s3://a", gpus=[0]), made().points)
    with raises_code("sweep-empty"):
        skypilot(made(claim="s3://a"), [])
