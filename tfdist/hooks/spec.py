"""Hook specs: `allreduce:bucket_mb=4` names a hook and its parameters in one string."""

import inspect

from tfdist.errors import UsageError
from tfdist.hooks.allreduce import AllReduce
from tfdist.hooks.base import Hook

HOOKS: dict[str, type[Hook]] = {AllReduce.name: AllReduce}


def parse(spec: "str | Hook | None") -> Hook:
    """Returns the hook that `spec` describes.

    Args:
        spec: a string `name[:parameter=value,...]`, a hook object (returned as it is), or None for the
            exact all-reduce with its default buckets.

    Raises:
        UsageError: unknown name or parameter, a value that is no number, or an object that is no hook.
    """
    if spec is None:
        return AllReduce()
    if isinstance(spec, Hook):
        return spec
    if not isinstance(spec, str):
        raise UsageError(f"hook={spec!r} is no hook: give a spec such as 'allreduce' or a tfdist.hooks.Hook object")
    name, _, rest = spec.partition(":")
    if name not in HOOKS:
        raise UsageError(f"hook={spec!r}: unknown hook {name!r}; choose one of {', '.join(sorted(HOOKS))}")
    allowed = list(inspect.signature(HOOKS[name].__init__).parameters)[1:]
    parameters: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key not in allowed or not equals:
            raise UsageError(f"hook={spec!r}: unknown parameter {item!r}; {name} takes {', '.join(allowed)}=NUMBER")
        try:
            parameters[key] = float(value)
        except ValueError:
            raise UsageError(f"hook={spec!r}: {key}={value!r} is no number") from None
    try:
        return HOOKS[name](**parameters)
    except UsageError as error:
        raise UsageError(f"hook={spec!r}: {error}") from None
