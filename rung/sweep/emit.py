"""A sweep as files for engines that rung does not talk to: a Kubernetes Job, and a SkyPilot task.

The file runs the same command as every launcher, `rung sweep point FOLDER KEY`, on storage that holds the sweep's
folder. Submitting it, and providing code, data and that folder, is left to the user; its header says how. All text is
quoted: keys are hexadecimal, and one such as 20541e700182 is a number to the YAML of Kubernetes, though not to
Python's.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from rung.errors import UserError
from rung.sweep.launch import Resources, int_option, list_option, text_option
from rung.sweep.point import FAILED, STOPPED
from rung.sweep.space import Point, Sweep
from rung.text import one_line

GRACE_S = 300  # from the request to stop to the kill: a large model is saved in that time
MOST_LOST = 5  # pods of one point that vanish without a word
_PLAIN = re.compile(r"[A-Za-z][A-Za-z/_.-]*")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_OTHER = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}  # words that YAML reads as values


def kubernetes(sweep: Sweep, points: Sequence[Point]) -> str:
    """A Job with one index for each point. Its claim's volume is seen where `launch: mount` says, or where the runs
    folder lies here."""
    mount, folder = _folder(sweep, points)
    image = text_option(sweep, "image")
    if not image:
        message = "a Kubernetes Job needs an image with rung in it: give `launch: image` in the sweep file."
        raise UserError(message, code="missing-option")
    claim = text_option(sweep, "claim") or "rung-runs"
    if not _CLAIM.fullmatch(claim):
        message = f"launch: claim={claim!r} is not the name of a PersistentVolumeClaim, such as rung-runs."
        raise UserError(message, code="bad-name")
    needs = Resources.of(sweep)
    asked = {"cpu": str(needs.cpus)}
    if needs.mem_gb:
        asked["memory"] = f"{round(needs.mem_gb * 1024)}Mi"
    limits = {name: value for name, value in asked.items() if name == "memory"}
    if needs.gpus:
        asked["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(needs.gpus)
    # Exit code 3 and an eviction are followed by another pod, however often; 1 ends this point alone; anything else is
    # tried a few times.
    rules: list[dict[str, Any]] = [
        {"action": action, "onExitCodes": {"containerName": "point", "operator": "In", "values": [code]}}
        for action, code in (("Ignore", STOPPED), ("FailIndex", FAILED))
    ]
    rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    num = len(points)
    name = label(f"rung-{sweep.name}", 63 - 1 - len(str(num - 1)))  # a pod is named after the job and its index
    keys = [point.key for point in points]
    # The shell gets folder and keys as arguments, counts to its own, and becomes the point's process. Kubernetes
    # replaces $(NAME) in a command, and takes $$ for a dollar sign.
    script = 'shift "$JOB_COMPLETION_INDEX"; exec rung sweep point "$0" "$1"'
    container = {
        "name": "point",
        "image": image,
        "command": ["/bin/sh", "-c", script, *(text.replace("$", "$$") for text in (folder, *keys))],
        "env": [{"name": "OMP_NUM_THREADS", "value": str(int_option(sweep, "threads", 1))}],
        "resources": {"requests": asked, **({"limits": limits} if limits else {})},
        "volumeMounts": [{"name": "runs", "mountPath": mount}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "rung", "rung/sweep": label(sweep.name, 63)}},
        "spec": {
            "completionMode": "Indexed",
            "completions": num,
            "parallelism": min(num, int_option(sweep, "array_parallelism", num)),
            "backoffLimitPerIndex": MOST_LOST,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": {"rung/sweep": label(sweep.name, 63)}},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": GRACE_S,
                    "containers": [container],
                    "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}],
                },
            },
        },
    }
    head = [
        f"Sweep {one_line(sweep.name)}: {num} points, for Kubernetes 1.29 or newer. The volume of claim {claim} must",
        f"hold the runs folder with .sweeps/{one_line(sweep.name)} in it, and data where the configs name it.",
        "A point that was stopped or evicted continues from its checkpoint; one that failed leaves the others alone.",
        "  kubectl apply -f FILE",
        f"  kubectl get pods -l job-name={name}",
        f"  kubectl delete job {name}    (trainings save first; the runs stay)",
    ]
    return _file(head, job)


def skypilot(sweep: Sweep, points: Sequence[Point]) -> str:
    """One task, launched once for each point with its key as POINT. Its claim is a bucket, which is mounted as the runs
    folder."""
    (mount, folder), needs = _folder(sweep, points), Resources.of(sweep)
    bucket = text_option(sweep, "claim")
    if not bucket or "://" not in bucket:
        message = "SkyPilot needs a bucket for the runs: give `launch: claim`, such as s3://my-bucket/runs."
        raise UserError(message, code="missing-option")
    accelerators = text_option(sweep, "accelerators")
    if needs.gpus and not accelerators:
        message = "SkyPilot needs the name of the GPUs: give `launch: accelerators`, such as H100."
        raise UserError(message, code="missing-option")
    resources: dict[str, Any] = {"cpus": f"{needs.cpus}+"}
    if needs.mem_gb:
        resources["memory"] = f"{needs.mem_gb:g}+"
    if accelerators:
        resources["accelerators"] = accelerators if ":" in accelerators else f"{accelerators}:{max(1, needs.gpus)}"
    image = text_option(sweep, "image")
    if image:
        resources["image_id"] = image if image.startswith("docker:") else f"docker:{image}"
    resources["job_recovery"] = {"recover_on_exit_codes": [STOPPED]}
    name = label(f"rung-{sweep.name}", 50)
    task = {
        "name": name,
        "num_nodes": 1,
        "resources": resources,
        "workdir": ".",
        "envs": {"POINT": points[0].key, "OMP_NUM_THREADS": str(int_option(sweep, "threads", 1))},
        # Cached: a plain mount of a bucket can neither append to a file nor rename one, and a run does both.
        "file_mounts": {mount: {"source": bucket, "mode": "MOUNT_CACHED"}},
        "setup": "\n".join(list_option(sweep, "setup") or ([] if image else ["pip install rung"])) + "\n",
        "run": f'exec rung sweep point {shlex.quote(folder)} "$POINT"\n',
    }
    if task["setup"] == "\n":
        del task["setup"]
    head = [
        f"Sweep {one_line(sweep.name)}: {len(points)} points, each a managed job of SkyPilot that continues from its",
        f"checkpoint when its machine is taken away. {one_line(bucket)} must hold the runs folder with",
        f".sweeps/{one_line(sweep.name)} in it.",
        f"  for point in {' '.join(point.key for point in points)}; do",
        f'    sky jobs launch --yes --detach-run --name "{name}-$point" --env POINT="$point" FILE',
        "  done",
    ]
    return _file(head, task)


def label(text: str, most: int) -> str:
    """A name by the rules of RFC 1123: lower-case letters, digits and dashes, of at most so many characters. One that
    had to be changed ends with a few digits of its hash, so that two different ones stay different."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain == text and len(plain) <= most:
        return plain
    digits = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return f"{plain[: most - len(digits) - 1].rstrip('-')}-{digits}".lstrip("-")


def _folder(sweep: Sweep, points: Sequence[Point]) -> tuple[str, str]:
    """Where the runs and the folder of the sweep are seen on the cluster."""
    if not points:
        message = f"sweep {sweep.name} has no points left to write; `rung sweep show {sweep.name}` says how it stands."
        raise UserError(message, code="sweep-empty")
    mount = text_option(sweep, "mount") or str(sweep.runs)
    if not PurePosixPath(mount).is_absolute() or ":" in mount:
        message = f"launch: mount={mount!r} must be an absolute path without a colon, such as /runs."
        raise UserError(message, code="bad-value")
    return mount, str(PurePosixPath(mount, *sweep.folder.relative_to(sweep.runs).parts))


class _Quoted(yaml.SafeDumper):
    """Writes text in double quotes unless every YAML reads it as text, and repeats what is used twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and all(one.isprintable() for one in text.splitlines()):
        style: str | None = "|"
    else:
        style = None if _PLAIN.fullmatch(text) and text.lower() not in _OTHER else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Quoted.add_representer(str, _write_text)


def _file(head: Sequence[str], document: Any) -> str:
    comment = "".join(f"# {one}\n" for one in head)
    return comment + yaml.dump(document, Dumper=_Quoted, sort_keys=False, allow_unicode=True, width=1000)
