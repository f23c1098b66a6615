"""From what the tries answered to a verdict. Pure: the same answers, the same verdict, and no model in sight.

The rule is the table of counterfactuals. A failure that follows the batch is in the data; one that stays with the
weights is in them; one that needs both is a combination; one that needs neither is in the model. Before that come the
answers that settle it alone: state that was bad already, a step that never fails again, compiled code that fails where
eager does not, a number that a wider type holds. What could not be asked is said, and lowers the confidence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rung.forensics.autopsy import Autopsy
from rung.forensics.first import Origin
from rung.forensics.rerun import Trial, Try

ORIGINS = ("DATA", "WEIGHTS", "OPTIMIZER", "MODEL MATH", "PRECISION", "DEVICE", "COMPILER", "COMBINATION", "TRANSIENT",
           "NORM OVERFLOW", "LEARNING RATE")  # fmt: skip

LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38}


class Broken(NamedTuple):
    """The step that left weights behind that are not finite, found by taking the steps before again."""

    step: int
    searched: str  # which steps were taken, in words
    tensors: list[str] = []
    are_gradients_finite: bool = False
    autopsy: Autopsy | None = None


@dataclass
class Answers:
    """What is known of a failed step. None: it could not be asked."""

    step: int
    dtype: str
    device: str
    is_compiled: bool = False
    error: str = ""  # what the step raised when it was recorded
    num_tries: int = 0
    num_failed: int = 0
    failed: Try | None = None  # the first try that did
    rank: int | None = None
    micro: int | None = None
    bad_weights: list[str] = field(default_factory=list)
    bad_state: list[str] = field(default_factory=list)
    broken: Broken | None = None
    autopsy: Autopsy | None = None
    found: Origin | None = None
    batch: list[str] = field(default_factory=list)  # what is odd about it, as sentences
    is_empty: bool = False  # the micro has no target
    is_out_of_range: bool = False  # an id is looked up that its table does not have
    ladder: dict[str, bool] = field(default_factory=dict)  # conditions -> whether it fails there
    others: tuple[int, int] | None = None  # of these weights with other batches: how many failed, of how many
    older: tuple[str, bool] | None = None  # of this batch with older weights: which, and whether it failed
    growth: str = ""  # which weight grew most since then
    samples: list[int] = field(default_factory=list)
    num_rows: int = 0
    rest_fails: bool | None = False  # also without these samples; None: it cannot be tried without them
    cut: str = "alone"  # how the samples fail: alone, in company, together
    # Rivals: what may have been wrong before the step.
    lr: float = 0.0
    is_adam: bool = False
    signs: list[str] = field(default_factory=list)  # that updates blew the weights up
    state_faults: list[str] = field(default_factory=list)  # moments that no gradients leave behind
    small_moments: str = ""  # their type, if it is too small
    loud_inputs: dict[str, float] = field(default_factory=dict)
    loud_weights: dict[str, float] = field(default_factory=dict)
    slower: Trial | None = None  # the steps before with a lower learning rate
    rescaled: Trial | None = None  # this step, or those before it, with inputs of size 1
    smaller: Trial | None = None  # this step with smaller weights
    not_tested: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    origin: str
    confidence: str  # sure, likely, unsure
    what: str
    step: int
    micro: int | None = None
    rank: int | None = None
    module: str = ""
    op: str = ""
    line: str = ""
    text: str = ""  # of the line
    phase: str = ""
    inputs: list[str] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    not_tested: list[str] = field(default_factory=list)
    remedy: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    def command(self, run: str) -> str:
        """What to type next, where keys would cure it."""
        if not self.changes:
            return ""
        words = " ".join(f"{key}={value}" for key, value in self.changes.items())
        return f'rung train --parent {run} {words} --why "step {self.step}: {self.origin.lower()}"'

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report, as a person reads it."""
        place = [f"step {self.step}"]
        place += [f"rank {self.rank}"] if self.rank is not None else []
        place += [f"micro {self.micro}"] if self.micro is not None else []
        place += [f"sample {', '.join(map(str, self.samples))}"] if self.samples else []
        lines = [f"{self.origin}  {self.confidence}  {'  '.join(place)}", f"  {self.what}"]
        op = " ".join(filter(None, [self.op, f"({self.phase})" if self.phase not in ("", "forward") else ""]))
        rows = {"module": self.module, "op": op, "line": f"{self.line}  {self.text}".rstrip()}
        lines += [f"  {name:<10}{value}" for name, value in rows.items() if value]
        for name, several in {"inputs": self.inputs, "evidence": self.evidence, "untested": self.not_tested}.items():
            lines += [f"  {name if n == 0 else '':<10}{value}" for n, value in enumerate(several)]
        return lines + ([f"  {'try':<10}{self.remedy}"] if self.remedy else [])


# Another eps, or a fused optimizer, only puts it off: squares of usual gradients are 0 in float16 as well.
HALF = "keep the trained weights in float32, and compute under autocast: then the optimizer's moments are float32 too"
# By the cause that an autopsy found.
OPTIMIZER_REMEDIES = {
    "eps": HALF,
    "square": HALF,
    "half": HALF,
    "state": "resume from a save before the state was written to or loaded; if there is none, make the optimizer anew",
    "large": "lower the learning rate, warm up longer, or clip gradients",
    "rate": "lower the learning rate, or fix its schedule: it must be finite, and small beside the weights",
    "size": "lower the learning rate, or keep weights in float32",
    "unknown": "compare with another optimizer",
}


def judge(a: Answers) -> Verdict:
    """The questions in their order; the first that has an answer decides."""
    verdict = _settled(a) or _by_conditions(a) or _by_counterfactuals(a)
    rival = _rival_of(verdict, a)
    verdict = rival or verdict
    verdict.rank, verdict.micro = a.rank, a.micro
    verdict.not_tested = a.not_tested
    verdict.evidence += a.batch + _evidence(a)
    if a.found is not None:
        verdict.module, verdict.op, verdict.phase = a.found.module, a.found.op, a.found.phase
        verdict.line, verdict.text = a.found.line, a.found.text
        verdict.inputs = [str(r) for r in a.found.inputs]
    if verdict.origin in ("DATA", "COMBINATION") and rival is None:
        verdict.samples = a.samples
    return verdict


def _settled(a: Answers) -> Verdict | None:
    """What needs no comparison."""
    if a.bad_weights:
        broken, names = a.broken, _some(a.bad_weights)
        if broken is None:
            what = f"not finite before the step: {names}; since when could not be found"
            return Verdict("WEIGHTS", "likely", what, a.step, remedy="go back to a save from before")
        if broken.step < 0:
            what = f"not finite when the run began: {names}"
            return Verdict("WEIGHTS", "sure", what, a.step, remedy="fix the initial weights")
        if broken.are_gradients_finite:
            return _optimizer(broken.autopsy, broken.step, broken.tensors)
        if broken.tensors:
            what = f"{_some(broken.tensors)} became non-finite in the forward of step {broken.step}, before any update"
            remedy = "find what writes into this weight during the forward; resume from the save before"
            return Verdict("WEIGHTS", "sure", what, broken.step, remedy=remedy)
        what = f"not finite before the step: {names}; {broken.searched}, taken again, left them finite"
        remedy = "look for code that writes into weights between steps; resume from the last save"
        return Verdict("WEIGHTS", "likely", what, a.step, remedy=remedy)
    if a.bad_state:
        what = f"the optimizer's state was not finite before the step: {_some(a.bad_state)}"
        remedy = "go back to a save from before; a gradient whose square does not fit makes such a state"
        return Verdict("OPTIMIZER", "sure", what, a.step, remedy=remedy)
    if a.failed is None:
        how, confidence = f"raised {a.error}" if a.error else "failed", "unsure" if a.not_tested else "likely"
        what = f"it {how} when it was recorded, and did not once in {a.num_tries} tries of the same numbers"
        if not a.num_tries:
            what = "it was kept without a batch, and weights and moments are finite: there is nothing to take again"
            confidence = "unsure"
        remedy = (
            "resume from the last save; if it comes back at other steps, suspect the machine (memory, heat), or code "
            "that depends on something besides the step: a clock, a counter, a file"
        )
        return Verdict("TRANSIENT", confidence, what, a.step, remedy=remedy)
    if a.failed.place in ("weights", "state"):
        return _optimizer(a.autopsy, a.step, a.failed.tensors)
    if a.failed.place == "norm":
        what = "every gradient is finite, only their norm is not: it does not fit"
        remedy = "scale the loss down, or fix what makes gradients this large; nothing else is wrong with the step"
        return Verdict("NORM OVERFLOW", "sure", what, a.step, remedy=remedy)
    return None


def _optimizer(found: Autopsy | None, step: int, tensors: list[str]) -> Verdict:
    what = f"gradients were finite, and the update broke {_some(tensors)}"
    if found is None:
        return Verdict("OPTIMIZER", "sure", what, step, remedy=OPTIMIZER_REMEDIES["unknown"])
    evidence = [f"implementations that stay finite in this step: {', '.join(found.fine)}"] if found.fine else []
    what, remedy = f"{what}: in {found.tensor} {found.what}", OPTIMIZER_REMEDIES[found.cause]
    origin = "LEARNING RATE" if found.cause == "rate" else "OPTIMIZER"
    return Verdict(origin, "sure", what, step, evidence=evidence, remedy=remedy)


def may_have_rivals(verdict: Verdict, a: Answers) -> bool:
    """Whether something that went wrong earlier could look like this."""
    fails_from_the_start = a.older is not None and a.older[1] and a.older[0].endswith("of the beginning")
    is_error = a.failed is not None and a.failed.place == "error"
    is_settled = verdict.origin in ("TRANSIENT", "COMPILER", "DEVICE", "LEARNING RATE")
    is_settled |= verdict.origin == "DATA" and verdict.confidence == "sure"
    return not (is_settled or is_error or fails_from_the_start)


def _rival_of(verdict: Verdict, a: Answers) -> Verdict | None:
    """What was wrong before the step, where that explains the failure better than the verdict does.

    A failure in float16, in an operation, in the norm or in an update is what weights that were blown up look like.
    """
    found = a.autopsy or (a.broken.autopsy if a.broken is not None else None)
    cause = found.cause if found is not None else ""
    if not may_have_rivals(verdict, a) or cause in ("eps", "rate", "state"):
        return None
    seen = f"the step itself shows {verdict.origin}: {verdict.what}"
    if a.small_moments and (a.state_faults or a.signs):
        fault = a.state_faults[0] if a.state_faults else f"{a.small_moments} does not hold squares of gradients"
        what, confidence = f"half-precision weights and moments: {fault}", "sure" if a.state_faults else "likely"
        return Verdict("OPTIMIZER", confidence, what, a.step, evidence=[*a.signs, seen], remedy=HALF)
    if a.state_faults:
        what = f"the optimizer's state was broken before the step, in {a.state_faults[0]}"
        evidence = [*a.state_faults[1:3], *a.signs, seen]
        return Verdict("OPTIMIZER", "sure", what, a.step, evidence=evidence, remedy=OPTIMIZER_REMEDIES["state"])

    # Inputs of another scale and a rate that is too high both blow weights up; the one that is out of the ordinary did.
    is_high = a.lr > (0.1 if a.is_adam else 10.0)
    slower = [] if a.slower is None else [f"{a.slower.how}: {'fails too' if a.slower.fails else 'passes'}"]
    inputs = ", ".join(f"{_array(name)} has an rms of {rms:.3g}" for name, rms in a.loud_inputs.items())
    if a.loud_inputs and not (a.signs and is_high):
        does_help = a.rescaled is not None and not a.rescaled.fails
        if does_help or (a.rescaled is None and a.signs):
            what = f"the scale of the inputs: {inputs}, and everything that is computed from it grows with it"
            evidence = [f"{a.rescaled.how}: passes"] if a.rescaled is not None else []
            evidence += [*a.signs, *slower, seen]
            confidence, remedy = (
                "sure" if does_help else "likely",
                "normalise the inputs to a standard deviation near 1",
            )
            return Verdict("DATA", confidence, what, a.step, evidence=evidence, remedy=remedy)
    if a.signs and a.slower is not None and a.slower.fails:
        verdict.evidence.append(f"a learning rate that is too high was ruled out: {slower[0]}")
    elif a.signs:
        what = f"the learning rate {a.lr:.3g} was too high for these weights: {a.signs[0]}"
        if a.slower is not None:
            rate = a.slower.lr
            remedy = f"train with a learning rate of {rate:.2g}, at which the same steps pass, or lower"
            evidence, changes = [*slower, *a.signs[1:], seen], {"lr.learning_rate": f"{rate:.2g}"}
            return Verdict("LEARNING RATE", "sure", what, a.step, evidence=evidence, remedy=remedy, changes=changes)
        remedy = "start again with a tenth of the learning rate, or a longer warm-up"
        if is_high:
            usual = "1e-4 to 1e-2 with Adam" if a.is_adam else "below 1 with SGD"
            remedy = f"start again with a learning rate that is usual for the optimizer ({usual}), and a warm-up"
        return Verdict("LEARNING RATE", "likely", what, a.step, evidence=[*a.signs[1:], seen], remedy=remedy)
    if a.smaller is not None and not a.smaller.fails and not a.signs:
        name = max(a.loud_weights, key=lambda n: a.loud_weights[n])
        what = f"weights were too large before the step: of inputs of size 1, {name} makes {a.loud_weights[name]:.3g}"
        confidence, remedy = "likely", "go back to a save from before they grew; decay the weights, or lower the rate"
        if a.step == 0:
            confidence, remedy = "sure", "initialise with a standard deviation near 1 / sqrt(number of inputs)"
        return Verdict("WEIGHTS", confidence, what, a.step, evidence=[f"{a.smaller.how}: passes", seen], remedy=remedy)
    return None


def _by_conditions(a: Answers) -> Verdict | None:
    """A failure that goes away with the compiler, the precision or the device is theirs."""
    at = _at(a.found)
    if a.is_compiled and a.ladder.get("eager") is False:
        what, remedy = "it fails compiled, not eager", "train without compilation, or leave the module out of it"
        return Verdict("COMPILER", "sure", what, a.step, remedy=remedy, changes={"system.compile": "false"})
    if a.ladder.get("float32") is False:
        changes = {"system.dtype": "bfloat16" if a.ladder.get("bfloat16") is False else "float32"}
        confidence = "sure" if a.ladder.get("float64 on cpu") is False else "likely"
        what = f"it fails in {a.dtype}, not in float32{at}"
        remedy = "train in the wider type, or take this operation out of autocast"
        return Verdict("PRECISION", confidence, what, a.step, remedy=remedy, changes=changes)
    if a.device != "cpu" and a.ladder.get("float32 on cpu") is False:
        what = f"it fails on {a.device} in float32, not on the CPU{at}"
        remedy = "report the kernel; until then compute this operation another way, or on the CPU"
        return Verdict("DEVICE", "likely", what, a.step, remedy=remedy)
    return None


def _by_counterfactuals(a: Answers) -> Verdict:
    """This batch with other weights, these weights with other batches."""
    at, given = _at(a.found), a.found.given if a.found is not None else ""
    error = a.failed.error if a.failed is not None and a.failed.place == "error" else None
    # One of four or more may be bad in its own right; when many are, it is not this batch.
    only_this_batch = None if a.others is None else a.others[0] * 4 <= a.others[1]
    only_these_weights = None if a.older is None else not a.older[1]
    if a.is_empty and only_this_batch is not False:
        what = f"none of the targets of the micro counts: its loss is a mean over nothing{at}"
        remedy = "drop rows without targets, or sum losses and count targets instead of taking means"
        return Verdict("DATA", "sure", what, a.step, remedy=remedy)
    if given and not given.startswith(("weight ", "buffer ", "a constant")):
        what = f"{given} of the batch is not finite before anything is computed{at}"
        return Verdict("DATA", "sure", what, a.step, remedy="fix or drop the sample")
    if error is not None:
        what, confidence = f"the model raised {error}{at}", "sure" if only_this_batch else "likely"
        if only_this_batch or a.is_out_of_range:
            remedy = "fix or drop the sample, or make the model large enough for it"
            return Verdict("DATA", confidence, what, a.step, remedy=remedy)
        return Verdict("MODEL MATH", "likely", what, a.step, remedy="fix the model: it raises whatever it is given")
    if only_this_batch and only_these_weights:
        what = f"this batch fails, and with these weights only{at}"
        remedy = "leave this batch out; if it happens often, lower the learning rate or clip harder"
        return Verdict("COMBINATION", "sure", what, a.step, remedy=remedy, changes={"guard.policy": "skip"})
    if only_this_batch:
        confidence = "sure" if only_these_weights is False else "likely"
        remedy = "look at the sample; if it is as it should be, guard the operation against it"
        return Verdict("DATA", confidence, f"only this batch fails{at}", a.step, remedy=remedy)
    if only_these_weights:
        confidence = "sure" if only_this_batch is False else "unsure"
        what = f"these weights fail with other batches too, older ones do not{at}"
        remedy = "go back to a save from before, with a lower learning rate or a longer warm-up"
        return Verdict("WEIGHTS", confidence, what, a.step, remedy=remedy)
    is_known = only_this_batch is False and (only_these_weights is False or a.step == 0)
    remedy = "guard the operation: an eps inside, a clamp before, or a form that cannot overflow"
    what = f"it fails whatever it is given{at}"
    return Verdict("MODEL MATH", "sure" if is_known else "unsure", what, a.step, remedy=remedy)


def _at(found: Origin | None) -> str:
    if found is None:
        return ""
    node = f" under {found.node}" if found.node else ""
    return f": {found.op or 'the first operation'}{node} in {found.module or 'the loss'}"


def _evidence(a: Answers) -> list[str]:
    said = []
    if a.num_tries:
        said.append(f"fails in {a.num_failed} of {a.num_tries} tries as it was recorded ({a.dtype}, {a.device})")
    if a.found is not None and a.found.given:
        met = f", as {a.found.argument} of {a.found.op}" if a.found.op else ""
        said.append(f"bad before any operation: {a.found.given}{met}")
    if a.found is not None and a.found.filled:
        said.append(f"the infinities that went in were put there by {a.found.filled}")
    if a.ladder:
        said.append(", ".join(f"{how} {'fails' if fails else 'passes'}" for how, fails in a.ladder.items()))
    if a.ladder.get("float64 on cpu") is False and a.dtype == "float32":
        said.append("the numbers outgrow float32 (largest 3.4e38); float64 holds them")
    if a.found is not None and a.ladder.get("float32") is False and a.dtype in LARGEST:
        said.append(f"the largest input of {a.found.op} is {a.found.peak:.4g}; {a.dtype} ends at {LARGEST[a.dtype]:g}")
    if a.others is not None:
        said.append(f"these weights fail with {a.others[0]} of {a.others[1]} other batches")
    if a.older is not None:
        said.append(f"this batch {'fails' if a.older[1] else 'passes'} with {a.older[0]}")
        said += [a.growth] if a.growth else []
    if a.samples and len(a.samples) < a.num_rows:
        rows = ", ".join(map(str, a.samples))
        rest = {
            True: "and the rest of the micro too",
            False: "the rest of the micro passes without them",
            None: "the rest of the micro cannot be tried without them",
        }[a.rest_fails]
        said.append(f"of {a.num_rows} rows these fail {a.cut}: {rows}; {rest}")
    if a.failed is not None and a.failed.place == "gradient":
        said.append(f"the loss is finite, gradients are not: {_some(a.failed.tensors)}")
    if a.failed is not None and a.failed.place == "sum":
        said.append(f"the gradients of each micro are finite, their sum is not: {_some(a.failed.tensors)}")
    return said


def _array(name: str) -> str:
    """What a script passes without a name has a number."""
    return f"input {name}" if name.isdecimal() else name


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
