"""The rule about how a run ended: by an error of the script or the recipe, or without a word.

A run that diverged has stopped itself and is N1 to N7's. What is known of an error was recorded when it happened: what
was raised, and the last line of the user's own code that led there (runs/failure.py).
"""

from __future__ import annotations

from rung.doctor.finding import Finding
from rung.doctor.history import History
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import again


@rule("R6", "The run ended with an error", "scan")
def ended_badly(history: History) -> Finding | None:
    last = f"after {history.end} steps" if history.end else "before its first step"
    if history.status == "vanished":
        return Finding(
            "fatal",
            f"there is no sign of life since step {history.end - 1}: the process is gone and has said nothing"
            if history.end
            else "the process is gone and has said nothing, before its first step",
            since=history.end,
            evidence=["an error of Python would have been recorded; what is killed from outside says nothing"],
            probe="read the log of the machine: `dmesg` names processes killed for lack of memory, a scheduler its "
            "limits",
            remedy="ask for more memory or time, or find out who ended it; rows up to the last step are kept",
        )
    if history.status != "crashed":
        return None
    failure = next(iter(history.events_of("crash")[-1:]), {})
    error = str(failure.get("error") or history.reason or "the run does not say why")
    place = f"{failure['file']}:{failure.get('line')}" if failure.get("file") else ""
    where = f"{place}, in {failure.get('function')}" + (f": {failure['code']}" if failure.get("code") else "")
    return Finding(
        "fatal",
        f"the run crashed {last}: {error}",
        since=history.end,
        evidence=[f"the last line of your own code: {where}" if place else "", str(failure.get("raised_in") or "")],
        probe="" if place else "read the traceback of the process",
        remedy=f"fix the error{f' at {place}' if place else ''}, then {again(history)}",
    )
