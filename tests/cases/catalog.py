"""All cases. A file of cases is named here and has a list CASES."""

from __future__ import annotations

import importlib
import importlib.util

from tests.cases.case import Case

FILES = (
    "numerics_cases", "optimisation_cases", "activations_cases", "objective_cases", "data_cases", "conditional_cases",
    "performance_cases", "provenance_cases", "preflight_cases", "plan_cases",
)  # fmt: skip


def cases() -> list[Case]:
    found = []
    for name in FILES:
        if importlib.util.find_spec(f"tests.cases.{name}"):
            found += importlib.import_module(f"tests.cases.{name}").CASES
    return found
