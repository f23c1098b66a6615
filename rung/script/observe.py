"""What a loop shows of itself without being asked: steps of its optimizers, rates, and whether its weights move.

`rung.init` observes; `run.watch` and `run.guard` measure. Torch tells all hooks of every `optimizer.step()`. At rows
that lie ever further apart, a dozen in a run, a few numbers of each weight are compared with what they were; only then
a device is waited for. The model is found where the script itself has it, in the frames that called `run.log`. Nothing
of it is kept alive or changed, and what goes wrong in here ends the observing, not the training.

What was found becomes an event `observed`, of which the rules of doctor/rules/own_loops.py read the last:

    rows, updates      rows of training so far, and steps of any optimizer of torch
    looks, num_tensors how often weights were compared, and how many are compared
    moved              of these, how many have ever changed
    still              names of those that had a gradient, and have never changed
    no_gradient        how many of an optimizer's tensors had no gradient at any look
    displaced          how far the weights are from where they began, relative to their size: the median matrix
    left_out           parameters of the model that get a gradient, and no optimizer has them
    strangers          whether no optimizer has any parameter of the model that gets gradients
    accumulates        whether gradients are those of all steps so far: nobody sets them to zero
    differs            keys of the config that the optimizer has other values for, and the same ones at all looks
    half               weights in half precision: their type, how many numbers with a gradient were followed through a
                       step, and how many of them stayed as they were, in the step that moved most of them
    evals              how many of the script's evals were looked at, of how many no module in sight was switched to
                       eval mode since the one before, and what in the model differs between the modes
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rung.runs.failure import is_users
from rung.script.settings import dotted

if TYPE_CHECKING:
    from rung.script.run import OwnRun

FIRST_LOOK = 8  # rows of training; the next ones at 16, 32, 64 ..
MOST_TENSORS, MOST_NUMBERS = 256, 16  # that are compared: with 48 tensors a look takes 0.6 ms on one core
MOST_FRAMES, MOST_MARKS = 40, 2000
ACCUMULATION_AT = (6, 12, 24)  # updates after which the gradient of one tensor is followed through a step
HALF_FROM, MOST_EVALS = 24, 32  # the first update that is followed, then each that is twice as late; evals looked at
SMALL = 65_536  # numbers of that tensor at most
# Matrices that are compared with where they began, from this row on and until they are FAR from there.
MOST_MATRICES, DISTANCE_FROM, FAR = 32, 64, 0.25
# What scripts call the settings of an optimizer. Not lr, which schedules move.
_NAMES = {
    "weight_decay": ("weight_decay", "wd"),
    "eps": ("adam_eps", "adam_epsilon"),
    "momentum": ("momentum",),
    "beta1": ("beta1", "adam_beta1"),
    "beta2": ("beta2", "adam_beta2"),
}


class Observer:
    def __init__(self, run: OwnRun) -> None:
        self._run = weakref.ref(run)
        self._hook: Any = None  # torch's, once there is a torch
        self._is_off = False
        self._num_rows = self._num_updates = self._next_look = 0
        self._next_look = FIRST_LOOK
        self._lr: float | None = None
        self._lr_at = 0  # the update whose rate was given to a row
        self.is_measured = False  # somebody records rates and norms better
        self._optimizers: dict[int, Any] = {}  # id -> weak reference, of those that have stepped
        self._samples: dict[int, _Sample] = {}  # id of a parameter ->
        self._num_looks = 0
        self._displaced: float | None = None
        self._due: set[int] = set()  # optimizers whose tensors are looked at when they next step
        self._facts: dict[str, Any] = {}
        self._marks: dict[int, tuple[Any, int]] = {}  # id of a parameter -> its gradient at the last look, and version
        self._is_known = False
        self._left_out: set[int] = set()
        self._has_strangers = False
        self._followed: list[_Followed] = []
        self._following: _Followed | None = None
        self._differed: dict[str, set[float]] = {}  # what the optimizers had at each look, where that differs
        self._halves: list[tuple[_Sample, Any]] | None = None  # tensors in half precision before a step
        self._next_half = HALF_FROM
        self._half: dict[str, Any] = {}
        self._evals: dict[str, Any] = {"looked": 0, "in_train_mode": 0, "has": ""}
        self._last_eval: tuple[int, set[float]] = (-1, set())  # the update it came after, and its numbers
        self._num_switched = 0

    def row(self, values: dict[str, Any], is_train: bool, evals: Mapping[str, Mapping[str, Any]] = {}) -> None:
        """At each row that the script logs, before it is written: adds the rate that the optimizer has."""
        if self._is_off:
            return
        try:
            if self._hook is None:
                if "torch" not in sys.modules:
                    return
                self._attach()
            if evals and self._num_updates and self._evals["looked"] < MOST_EVALS:
                self._look_at_eval(evals)
            if not is_train:
                return
            self._num_rows += 1
            if self._lr is not None and self._lr_at < self._num_updates and not self.is_measured:
                self._lr_at = self._num_updates
                values.setdefault("lr", self._lr)
            if self._num_rows >= self._next_look:
                self._next_look *= 2
                self._due = {key for key, known in self._optimizers.items() if known() is not None}
                if not self._due:
                    self._look(None)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """A last look, and none of torch's hooks is left behind."""
        if self._is_off or self._hook is None:
            self._is_off = True
            return
        try:
            if self._num_rows:
                self._look(None)
        except Exception as error:
            self._give_up(error)
        self.remove()

    def remove(self) -> None:
        if not self._is_off and self._hook is not None:
            Switches.stop()
        self._is_off = True
        if self._hook is not None:
            self._hook.remove()
        if self._following is not None:
            self._following.handle.remove()
            self._following = None
        self._samples.clear()
        self._halves = None

    def _give_up(self, error: Exception) -> None:
        self.remove()
        if (run := self._run()) is not None:
            run.out.event("warning", text=f"the loop is no longer observed: {type(error).__name__}: {error}"[:300])

    def _attach(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        me = weakref.ref(self)  # torch keeps the hook

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (observer := me()) is not None and not observer._is_off:
                try:
                    observer._stepped(optimizer)
                except Exception as error:
                    observer._give_up(error)

        self._hook = register_optimizer_step_post_hook(stepped)
        Switches.begin()
        self._num_switched = Switches.count

    def _stepped(self, optimizer: Any) -> None:
        self._num_updates += 1
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is None:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            if self._num_updates == 1 or len(self._optimizers) == 1:
                self._samples_of(optimizer)
        if id(optimizer) in self._due:  # here, where its gradients still are
            self._due.discard(id(optimizer))
            self._look(optimizer)
        if next(iter(self._optimizers)) == id(optimizer):
            lr = optimizer.param_groups[0].get("lr")
            self._lr = lr if type(lr) is float else None  # (one on a device is not waited for)
            if self._following is not None:
                self._following.end()
                self._followed.append(self._following)
                self._following = None
            elif self._num_updates in ACCUMULATION_AT and len(self._optimizers) == 1:
                self._following = _Followed.of(optimizer)
            if self._halves is not None:
                self._end_halves()
            elif self._num_updates >= self._next_half:
                self._next_half *= 2
                self._begin_halves(optimizer)

    # Weights in half precision, of which a step may be too small to move any.

    def _begin_halves(self, optimizer: Any) -> None:
        torch = sys.modules["torch"]
        if _keeps_what_is_lost(optimizer):
            return
        own = {id(p) for p in _parameters_of(optimizer) if p.dtype in (torch.float16, torch.bfloat16)}
        followed = [sample for key, sample in self._samples.items() if key in own]
        if followed and any(group.get("lr") for group in optimizer.param_groups):
            self._halves = [(sample, sample.values()) for sample in followed]

    def _end_halves(self) -> None:
        halves, self._halves = self._halves or (), None
        num_followed = num_still = 0
        dtype = ""
        for sample, before in halves:
            parameter = sample.parameter()
            if parameter is None or parameter.grad is None or parameter.grad.is_sparse:
                continue
            has_gradient = sample.picked(parameter.grad) != 0
            num_followed += int(has_gradient.sum())
            num_still += int((has_gradient & (sample.picked(parameter) == before)).sum())
            dtype = str(parameter.dtype).removeprefix("torch.")
        best = self._half["still"] / self._half["followed"] if self._half else 2.0
        if num_followed and num_still / num_followed < best:
            self._half = {"dtype": dtype, "followed": num_followed, "still": num_still}

    # Looks, which are rare.

    def _look_at_eval(self, evals: Mapping[str, Mapping[str, Any]]) -> None:
        """Whether a module was switched to eval mode since the eval before, where that makes a difference. Rows of one
        eval may be several, and numbers may be logged again: both are no other eval."""
        torch = sys.modules["torch"]
        numbers = {value if type(value) is float else id(value) for of in evals.values() for value in of.values()}
        update, known = self._last_eval
        is_same = update == self._num_updates or numbers <= known
        self._last_eval = (self._num_updates, numbers | known if is_same else numbers)
        if is_same:
            return
        was_switched, self._num_switched = Switches.count != self._num_switched, Switches.count
        parts = {part for module in in_sight()[0] for part in module.modules() if has_modes(part, torch)}
        if not parts:
            return
        self._evals["looked"] += 1
        if not was_switched and all(part.training for part in parts):
            self._evals["in_train_mode"] += 1
            self._evals["has"] = ", ".join(sorted({type(part).__name__ for part in parts})[:4])

    def _look(self, stepping: Any) -> None:
        """At all that is known, in the step of an optimizer at its gradients too; without one, at the model's own."""
        run = self._run()
        if run is None:
            return
        optimizers = [found for known in self._optimizers.values() if (found := known()) is not None]
        self._num_looks += 1
        for optimizer in optimizers:
            self._samples_of(optimizer)
        shown = None if not optimizers else set() if stepping is None else {id(p) for p in _parameters_of(stepping)}
        if stepping is not None or not optimizers:
            self._look_around({id(p): p for o in optimizers for p in _parameters_of(o)})
        for sample in self._samples.values():
            sample.look(sees_gradient=shown is None or sample.id in shown)
        found = self._found(optimizers, run, is_last=stepping is None)
        self._facts |= found  # what is gone by now stays as it was seen last
        run.out.event("observed", step=run.axis.last, **self._facts)

    def _look_around(self, owned: Mapping[int, Any]) -> None:
        """At the modules in sight: their names for what is trained, and what gets gradients and no optimizer has.

        A gradient counts that is another one than at the look before: what an earlier training has left does not.
        """
        modules, waiting = in_sight()
        named = {id(p): (name, p) for module in modules for name, p in module.named_parameters()}
        if not owned:  # optimizers that were made, and have not stepped
            owned = {id(p): p for optimizer in waiting for p in _parameters_of(optimizer)}
            self._take(list(owned.values()))
        for key, sample in self._samples.items():
            sample.name = named[key][0] if key in named else sample.name
        marks, left = dict[int, tuple[Any, int]](), []
        for key, (name, parameter) in named.items():
            gradient = parameter.grad
            if gradient is None or len(marks) > MOST_MARKS:
                continue
            before, marks[key] = self._marks.get(key), (weakref.ref(gradient), gradient._version)
            if key not in owned and before is not None and (before[0]() is not gradient or before[1] != marks[key][1]):
                left.append((name, parameter))
        self._is_known = self._is_known or any(key in owned for key in named) or bool(left)
        self._marks = marks
        self._take([p for _, p in left], {id(p): name for name, p in left})
        self._left_out = {id(p) for _, p in left}
        self._has_strangers = bool(left) and bool(owned) and all(p.grad is None for p in owned.values())

    def _found(self, optimizers: Sequence[Any], run: OwnRun, is_last: bool) -> dict[str, Any]:
        known = [sample for sample in self._samples.values() if sample.num_looks > 1]
        # Without an optimizer, what gets gradients is what is trained.
        owned = [sample for sample in known if not optimizers or sample.id not in self._left_out]
        facts: dict[str, Any] = {
            "rows": self._num_rows,
            "updates": self._num_updates,
            "looks": self._num_looks,
            "num_tensors": len(owned),
            "moved": sum(sample.has_moved for sample in owned),
            "still": [s.name for s in owned if not s.has_moved and s.num_gradients >= 2][:20],
            "no_gradient": sum(sample.num_seen > 0 and sample.num_gradients == 0 for sample in owned),
        }
        facts["is_model_known"] = self._is_known
        is_due = self._num_rows >= DISTANCE_FROM or is_last
        if is_due and (self._displaced is None or self._displaced < FAR):
            self._displaced = _displaced(owned)
        if self._displaced is not None:
            facts["displaced"] = self._displaced
        if optimizers:  # what somebody else than torch updates does move
            left = [s.name for s in known if s.id in self._left_out and not s.has_moved]
            facts |= {"left_out": left[:20], "strangers": self._has_strangers and bool(left)}
        if self._half:
            facts["half"] = self._half
        if self._evals["looked"]:
            facts["evals"] = self._evals
        verdicts = [verdict for followed in self._followed if (verdict := followed.verdict()) is not None]
        if verdicts:
            facts["accumulates"] = len(verdicts) > 1 and all(verdicts)
        if optimizers:
            differs = _differs(optimizers, dict(dotted(run.tree)))
            for key, (_, has) in differs.items():
                self._differed.setdefault(key, set()).add(has)
            # What moves is set by a schedule, as OneCycleLR does with momentum.
            facts["differs"] = {key: both for key, both in differs.items() if len(self._differed[key]) == 1}
            facts["rates"] = [_number(g.get("lr")) for o in optimizers for g in o.param_groups][:8]
        return facts

    def _samples_of(self, optimizer: Any) -> None:
        names = {
            id(p): str(name)
            for group in optimizer.param_groups
            for name, p in zip(group.get("param_names") or (), group["params"])
        }
        self._take(list(_parameters_of(optimizer)), names)

    def _take(self, parameters: Sequence[Any], names: Mapping[int, str] = {}) -> None:
        for number, parameter in enumerate(parameters):
            if len(self._samples) >= MOST_TENSORS:
                return
            known = self._samples.get(id(parameter))
            if (known is None or known.parameter() is None) and parameter.numel():
                name = names.get(id(parameter)) or f"parameter {number} {tuple(parameter.shape)}"
                self._samples[id(parameter)] = _Sample(parameter, name)


class _Sample:
    """A few numbers of one tensor, as they were when it was first seen."""

    def __init__(self, parameter: Any, name: str) -> None:
        self.parameter, self.id, self.name = weakref.ref(parameter), id(parameter), name
        self._stride = max(1, parameter.numel() // MOST_NUMBERS)
        self._first: Any = None
        self._sum: Any = None
        self.num_looks = self.num_seen = self.num_gradients = 0  # looks; of these at its gradient; of these not all 0
        self.has_moved = False
        self.look(sees_gradient=False)

    def look(self, sees_gradient: bool) -> None:
        parameter = self.parameter()
        if parameter is None:
            return
        gradient = parameter.grad if sees_gradient else None
        self.num_looks += 1
        self.num_seen += sees_gradient
        if self.has_moved and self.num_gradients:
            return
        values = self.picked(parameter)
        if self._first is None:
            self._first = values
            self.has_moved = values is not None and bool((values != values).all())  # broken by now, which N3 knows
        elif not self.has_moved and values is not None:
            self.has_moved = not _equal(values, self._first)
            if not self.has_moved and not _equal(self._whole(parameter), self._sum):
                self.has_moved = True  # elsewhere: rows of an embedding that were not looked at
        if self.num_looks == 1:
            self._sum = self._whole(parameter)
        if gradient is not None and not gradient.is_sparse:
            self.num_gradients += bool((gradient != 0).any())

    def displacement(self) -> float | None:
        """The distance from the first values, relative to their size; None where these are all 0, or were not seen."""
        values = self.values()
        if values is None or self._first is None or values.shape != self._first.shape:
            return None
        first = self._first.double()
        size = float(first.norm())
        return float((values.double() - first).norm()) / size if size > 0 else None

    def picked(self, tensor: Any) -> Any:
        flat = tensor.detach().reshape(-1)[:: self._stride]
        return flat[: 2 * MOST_NUMBERS].to("cpu", copy=True)

    def values(self) -> Any:
        parameter = self.parameter()
        return None if parameter is None else self.picked(parameter)

    def _whole(self, parameter: Any) -> Any:
        """A figure of the whole tensor, so that a change of any of its numbers shows."""
        return parameter.detach().abs().sum(dtype=sys.modules["torch"].float64).to("cpu", copy=True).reshape(1)


class _Followed:
    """The gradient of one tensor through one step: what was left of the last step, what came in, what was used.

    g = left + in means that nobody has set it to zero; g = in that somebody has. Up to a factor, as a clip or a scaler
    multiplies all of it.
    """

    def __init__(self, parameter: Any, left: Any) -> None:
        self._parameter, self._left = weakref.ref(parameter), left
        self._came: Any = None
        self._used: Any = None
        self._verdict: bool | None = None
        came: list[Any] = []
        self._all = came

        def note(gradient: Any) -> None:
            came.append(gradient.detach().clone())

        self.handle = parameter.register_hook(note)

    @classmethod
    def of(cls, optimizer: Any) -> _Followed | None:
        """The largest tensor that is small enough: of few numbers, two gradients may be alike by chance."""
        found = [
            p
            for p in _parameters_of(optimizer)
            if p.is_leaf and p.requires_grad and p.grad is not None and not p.grad.is_sparse and 2 < p.numel() <= SMALL
        ]
        if not found:
            return None
        parameter = max(found, key=lambda p: p.numel())
        return cls(parameter, parameter.grad.detach().clone())

    def end(self) -> None:
        self.handle.remove()
        parameter = self._parameter()
        if parameter is not None and parameter.grad is not None and self._all:
            self._used = parameter.grad.detach().clone()

    def verdict(self) -> bool | None:
        """Whether gradients accumulate; None where neither is seen, as with several processes that average."""
        if self._used is None or not self._all:
            return self._verdict
        came = sum(some.double() for some in self._all)
        left, used = self._left.double(), self._used.double()
        self._used = self._left = None
        self._all.clear()
        if _misfit(used, came) < 1e-4:
            self._verdict = False
        elif _misfit(used, left + came) < 1e-4:
            self._verdict = True
        return self._verdict


class Switches:
    """How often any module was put into eval mode. Torch tells nobody, so `nn.Module.train`, which `eval` calls, is
    another function while loops are observed, which counts and does the same."""

    count = 0
    _num_observers = 0
    _original: Any = None

    @classmethod
    def begin(cls) -> None:
        cls._num_observers += 1
        module = sys.modules["torch"].nn.Module
        if cls._original is not None:
            return
        original = cls._original = module.train

        @functools.wraps(original)
        def train(self: Any, mode: bool = True) -> Any:
            if not mode:
                cls.count += 1
            return original(self, mode)

        module.train = train

    @classmethod
    def stop(cls) -> None:
        cls._num_observers -= 1
        module = sys.modules["torch"].nn.Module
        # Where somebody else has put another function in its place meanwhile, theirs calls ours.
        if cls._num_observers == 0 and getattr(module.train, "__wrapped__", None) is cls._original:
            module.train, cls._original = cls._original, None


def has_modes(module: Any, torch: Any) -> bool:
    """Whether a module computes something else in training than in evals."""
    nn = torch.nn
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return bool(module.track_running_stats)
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0 and module.num_layers > 1)
    return isinstance(module, nn.MultiheadAttention) and bool(module.dropout > 0)


def _displaced(samples: Sequence[_Sample]) -> float | None:
    """Of the matrices among them: biases and gains are few numbers, and often begin at 0."""
    matrices = [s for s in samples if (parameter := s.parameter()) is not None and parameter.ndim > 1]
    few = matrices[:: -(-len(matrices) // MOST_MATRICES)] if matrices else []
    found = sorted(moved for sample in few if (moved := sample.displacement()) is not None)
    return found[len(found) // 2] if found else None


def _keeps_what_is_lost(optimizer: Any) -> bool:
    """Whether it has copies of its weights of a higher precision, or adds up what rounding took."""
    names = {str(name) for state in optimizer.state.values() if isinstance(state, dict) for name in state}
    return any(word in name.lower() for name in names for word in ("master", "comp", "kahan", "shift", "fp32"))


def _misfit(target: Any, given: Any) -> float:
    """What is left of one tensor without the multiple of another that explains most, as a share of it."""
    power, given_power = float((target * target).sum()), float((given * given).sum())
    if not power > 0 or not given_power > 0:
        return float("inf")
    rest = target - given * (float((target * given).sum()) / given_power)
    return float((rest * rest).sum() / power) ** 0.5


def in_sight() -> tuple[list[Any], list[Any]]:
    """Modules and optimizers: among local variables, what these have as attributes, and globals of who called."""
    frame: types.FrameType | None = sys._getframe(1)
    torch = sys.modules["torch"]
    modules, optimizers, kinds = dict[int, Any](), dict[int, Any](), dict[type, dict[int, Any] | None]()

    def note(value: Any) -> None:
        kind = type(value)
        if kind not in kinds:
            is_module, is_optimizer = issubclass(kind, torch.nn.Module), issubclass(kind, torch.optim.Optimizer)
            kinds[kind] = modules if is_module else optimizers if is_optimizer else None
        if (found := kinds[kind]) is not None:
            found[id(value)] = value

    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("rung", "torch"):
            known = frame.f_globals.values() if is_users(frame.f_code.co_filename) else ()
            for value in (*_locals_of(frame), *known):
                note(value)
                # A trainer of the script's own has its model as an attribute.
                is_code = isinstance(value, type | types.ModuleType | types.FunctionType)
                held = None if is_code else getattr(value, "__dict__", None)
                for part in held.values() if type(held) is dict else ():
                    note(part)
        frame = frame.f_back
    return list(modules.values()), list(optimizers.values())


def _locals_of(frame: types.FrameType) -> list[Any]:
    """Before Python 3.13 `f_locals` is a copy that the frame keeps: tensors in it would live for as long as it runs."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # of a module: its globals
        return []
    found = frame.f_locals
    values = list(found.values())
    if sys.version_info < (3, 13):
        found.clear()
    return values


def _parameters_of(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _equal(a: Any, b: Any) -> bool:
    """NaN is like itself: weights that broke have not stayed where they were, and N3 knows."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _differs(optimizers: Sequence[Any], config: Mapping[str, Any]) -> dict[str, list[float]]:
    """Keys of the config that name a setting of the optimizers, where no group of any of them has that value."""
    found: dict[str, list[float]] = {}
    for key, said in config.items():
        leaf = key.rpartition(".")[2].lower()
        name = next((name for name, others in _NAMES.items() if leaf in others), None)
        if name is None or isinstance(said, bool) or not isinstance(said, int | float):
            continue
        values = set()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            betas = group.get("betas")
            value = betas[int(name[-1]) - 1] if name.startswith("beta") and betas else group.get(name)
            if isinstance(value, int | float):
                values.add(float(value))
        if values and not any(abs(value - said) <= 1e-9 * max(1.0, abs(said)) for value in values):
            found[key] = [float(said), max(values)]
    return found
