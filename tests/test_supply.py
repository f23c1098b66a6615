"""If this fails, locked.txt is not what `make` installs, or a dependency is used at a version nobody has tried."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import supply

LOCKED = supply.locked(supply.LOCKED.read_text())


def requirements(*names: str) -> list[Requirement]:
    """The dependencies and those of extras, of extras that they name too."""
    own = supply.project()
    found = [Requirement(one) for one in own["dependencies"]]
    for name in names:
        for one in map(Requirement, own["optional-dependencies"][name]):
            found += requirements(*one.extras) if one.name == "rung" else [one]
    return found


def test_every_dependency_is_locked_at_a_version_it_allows() -> None:
    for one in requirements("dev"):
        name = supply.normal(one.name)
        if name == "torch":  # of a local wheel
            continue
        assert name in LOCKED, f"{name} is not in locked.txt; run `make lock`"
        assert one.specifier.contains(LOCKED[name][0]), f"{name}=={LOCKED[name][0]} is not {one}; run `make lock`"


def test_every_line_has_a_hash() -> None:
    lines = [line for line in supply.LOCKED.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(LOCKED) > 100
    assert all(hashes for _, hashes in LOCKED.values())
    assert "://" not in supply.LOCKED.read_text().replace("CycloneDX", "")


def test_what_is_locked_needs_nothing_else() -> None:
    """As `--no-deps` installs only these."""
    for name, (version, _) in LOCKED.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.version != version:
            continue
        for one in map(Requirement, found.requires or ()):
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            wanted = supply.normal(one.name)
            assert wanted in {*LOCKED, "torch", "setuptools", "pip"}, f"{name} needs {wanted}; run `make lock`"


def test_the_lower_bounds_are_what_pyproject_says() -> None:
    found = dict(line.split("==") for line in supply.lowest())
    for one in requirements():
        assert one.specifier.contains(found[one.name]), one
    assert len(found) == len(supply.project()["dependencies"])


def test_a_report_of_pip_becomes_a_lock() -> None:
    def item(name: str, version: str, digest: str) -> dict[str, object]:
        archive = {"archive_info": {"hashes": {"sha256": digest}}, "url": "file:///a/place/x.whl"}
        return {"metadata": {"name": name, "version": version}, "download_info": archive}

    text = supply.lock({"install": [item("torch", "2", "a" * 64), item("Some_Package", "1.0", "b" * 64)]})
    assert supply.locked(text) == {"some-package": ("1.0", ["b" * 64])}
    assert "place" not in text


@pytest.mark.parametrize("kind", ["required", "optional"])
def test_the_bill_names_what_is_needed(kind: str) -> None:
    bill = supply.bill_of_materials()
    names = {one["name"] for one in bill["components"] if one["scope"] == kind}
    assert {"required": {"numpy", "torch", "uplot"}, "optional": {"duckdb", "symusic"}}[kind] <= names
    assert bill == supply.bill_of_materials()
    assert Path(supply.__file__).name not in str(bill)
