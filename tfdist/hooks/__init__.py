"""Gradient-aggregation hooks: how the replicas' gradients become one gradient, and what that costs."""

from tfdist.hooks.allreduce import AllReduce
from tfdist.hooks.base import Hook, HookReport
from tfdist.hooks.bucketed import BucketedHook
from tfdist.hooks.feedback import ErrorFeedback
from tfdist.hooks.fidelity import Fidelity
from tfdist.hooks.half import BFloat16, Float16
from tfdist.hooks.hierarchical import Hierarchical
from tfdist.hooks.int8 import Int8
from tfdist.hooks.local_sgd import LocalSGD
from tfdist.hooks.message import Message
from tfdist.hooks.noop import NoOp
from tfdist.hooks.powersgd import PowerSGD
from tfdist.hooks.spec import parse
from tfdist.hooks.state import ReplicaState, replica_state
from tfdist.hooks.topk import TopK

__all__ = [
    "AllReduce",
    "BFloat16",
    "BucketedHook",
    "ErrorFeedback",
    "Fidelity",
    "Float16",
    "Hierarchical",
    "Hook",
    "HookReport",
    "Int8",
    "LocalSGD",
    "Message",
    "NoOp",
    "PowerSGD",
    "ReplicaState",
    "TopK",
    "parse",
    "replica_state",
]
