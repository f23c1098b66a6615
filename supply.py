"""What rung is made of: the locked versions with their hashes, the lower bounds, and the bill of materials.

    python supply.py lock REPORT    locked.txt out of what `pip install --dry-run --report REPORT` found
    python supply.py lowest         the core dependencies at their lower bounds, as requirements

`make lock` and `make test-lowest` call it; hatch_build.py puts the bill of materials into the wheel.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
LOCKED = ROOT / "locked.txt"
HEAD = """\
# Every package that `make` installs, torch aside, with the hash of its wheel for Linux on x86-64 and Python 3.11.
# Written by `make lock`. To install exactly these: torch first, as constraints.txt names it, then
# pip install --require-hashes --no-deps -r locked.txt
"""
_LINE = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})*)$")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(.*)$")


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lock(report: dict[str, Any]) -> str:
    """The text of locked.txt out of pip's report."""
    lines = []
    for item in report["install"]:
        meta, hashes = item["metadata"], item["download_info"]["archive_info"]["hashes"]
        if normal(meta["name"]) != "torch":
            lines.append(f"{normal(meta['name'])}=={meta['version']} --hash=sha256:{hashes['sha256']}")
    return HEAD + "\n".join(sorted(lines)) + "\n"


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Name -> version and hashes."""
    found = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            found[match[1]] = match[2], re.findall(r"[0-9a-f]{64}", match[3])
    return found


def lowest() -> Iterator[str]:
    """The core dependencies, each at the lowest version that it is declared with."""
    for requirement in project()["dependencies"]:
        match = _REQUIREMENT.match(requirement)
        assert match is not None
        bound = re.search(r">=\s*([0-9][^,;\s]*)", match[2])
        assert bound is not None, f"{requirement} has no lower bound"
        yield f"{match[1]}=={bound[1]}"


def bill_of_materials() -> dict[str, Any]:
    """What a wheel of rung needs and carries, in CycloneDX 1.6: declared packages as locked, and the pages' sources."""
    own, versions = project(), locked(LOCKED.read_text())
    components = []
    wanted = [*own["dependencies"], *(one for name, of in own["optional-dependencies"].items() for one in of
                                      if name not in ("dev", "bench"))]  # fmt: skip
    core = {normal(_REQUIREMENT.match(one)[1]) for one in own["dependencies"]}  # type: ignore[index]
    for name in sorted({normal(_REQUIREMENT.match(one)[1]) for one in wanted} - {"rung"}):  # type: ignore[index]
        version, hashes = versions.get(name, ("", []))
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "bom-ref": f"pkg:pypi/{name}" + (f"@{version}" if version else ""),
            "purl": f"pkg:pypi/{name}" + (f"@{version}" if version else ""),
            "scope": "required" if name in core else "optional",
        }
        if version:
            component["version"] = version
        if hashes:
            component["hashes"] = [{"alg": "SHA-256", "content": one} for one in hashes]
        components.append(component)
    # The pages are bundled; what is bundled into them comes from here.
    lockfile = json.loads((ROOT / "rung/web/page/package-lock.json").read_text())
    for path, package in sorted(lockfile["packages"].items()):
        name = path.rpartition("node_modules/")[2]
        if name == "uplot":
            purl = f"pkg:npm/{name}@{package['version']}"
            components.append({
                "type": "library", "name": name, "version": package["version"], "purl": purl, "bom-ref": purl,
                "scope": "required", "licenses": [{"license": {"id": package["license"]}}],
            })  # fmt: skip
    about = {
        "type": "library", "name": "rung", "version": own["version"], "purl": f"pkg:pypi/rung@{own['version']}",
        "bom-ref": "rung", "licenses": [{"license": {"id": own["license"]}}],
    }  # fmt: skip
    edges = sorted(one["bom-ref"] for one in components if one["scope"] == "required")
    content = json.dumps([about, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",  # equal builds have equal bills
        "version": 1,
        "metadata": {"component": about},
        "components": components,
        "dependencies": [{"ref": "rung", "dependsOn": edges}],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["lock"]:
        LOCKED.write_text(lock(json.loads(Path(sys.argv[2]).read_text())))
    elif sys.argv[1:2] == ["lowest"]:
        sys.stdout.write("\n".join(lowest()) + "\n")
    else:
        sys.exit(__doc__)
