"""Hook specs: `powersgd:rank=4` names a hook and its parameters in one string."""

import inspect

from tfdist.config import did_you_mean
from tfdist.errors import UsageError
from tfdist.hooks.allreduce import AllReduce
from tfdist.hooks.base import Hook
from tfdist.hooks.bucketed import AUTO
from tfdist.hooks.feedback import ErrorFeedback
from tfdist.hooks.fidelity import Fidelity
from tfdist.hooks.half import BFloat16, Float16
from tfdist.hooks.hierarchical import Hierarchical
from tfdist.hooks.int8 import Int8
from tfdist.hooks.local_sgd import LocalSGD
from tfdist.hooks.noop import NoOp
from tfdist.hooks.powersgd import PowerSGD
from tfdist.hooks.topk import TopK

HOOKS: dict[str, type[Hook]] = {
    kind.name: kind for kind in (AllReduce, BFloat16, Float16, Int8, TopK, PowerSGD, LocalSGD, NoOp)
}

# Whether error feedback comes with a hook that does not say: it costs memory, and helps where much is left out.
_FEEDBACK = {BFloat16: False, Float16: False, Int8: True, TopK: True, PowerSGD: True}


def parse(spec: "str | Hook | None") -> Hook:
    """Returns the hook that `spec` describes.

    Args:
        spec: a string `name[:parameter=value,...]`, a hook object (returned as it is), or None for the
            exact all-reduce. Beside a hook's own parameters, lossy hooks take `error_feedback=0` or `1`, all whose
            replicas agree take `hierarchical=1`, to sum exactly within each worker first, and all but noop take
            `sample_every=K`, to compare with the exact sum every K steps.

    Raises:
        UsageError: unknown name or parameter, a value that is not allowed, or an object that is no hook.
    """
    if spec is None:
        return AllReduce()
    if isinstance(spec, Hook):
        return spec
    if not isinstance(spec, str):
        raise UsageError(f"hook={spec!r} is no hook: give a spec such as 'allreduce' or a tfdist.hooks.Hook object")
    name, _, rest = spec.partition(":")
    if name not in HOOKS:
        raise UsageError(
            f"hook={spec!r}: unknown hook {name!r}; choose one of {', '.join(HOOKS)}{did_you_mean(name, list(HOOKS))}"
        )
    kind = HOOKS[name]
    own = list(inspect.signature(kind.__init__).parameters)[1:]
    extra = ["error_feedback"] if kind in _FEEDBACK else []
    extra += ["hierarchical"] if kind.replicas_agree and kind is not NoOp else []
    extra += ["sample_every"] if kind is not NoOp else []
    values = _values(spec, name, rest, own + extra)
    feedback = values.pop("error_feedback", float(_FEEDBACK.get(kind, False)))
    if feedback not in (0, 1):
        raise UsageError(f"hook={spec!r}: error_feedback={feedback!r}: 0 or 1 is needed")
    hierarchical = values.pop("hierarchical", 0.0)
    if hierarchical not in (0, 1):
        raise UsageError(f"hook={spec!r}: hierarchical={hierarchical!r}: 0 or 1 is needed")
    sample_every = values.pop("sample_every", None)
    try:
        hook: Hook = kind(**values)
        if feedback:
            hook = ErrorFeedback(hook)
        if sample_every is not None:
            hook = Fidelity(hook, every=sample_every)
        return Hierarchical(hook) if hierarchical else hook
    except UsageError as error:
        raise UsageError(f"hook={spec!r}: {error}") from None


def _values(spec: str, name: str, text: str, allowed: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in allowed or not equals:
            takes = f"{name} takes {', '.join(f'{a}=NUMBER' for a in allowed)}" if allowed else f"{name} takes none"
            raise UsageError(f"hook={spec!r}: unknown parameter {item!r}; {takes}{did_you_mean(key, allowed)}")
        if key == "bucket_mb" and value == AUTO:
            continue
        try:
            values[key] = float(value)
        except ValueError:
            raise UsageError(f"hook={spec!r}: {key}={value!r} is no number") from None
    return values
