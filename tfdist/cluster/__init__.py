"""Who am I in this job: the workers, this worker's index, and how they meet before training."""

from tfdist.cluster.base import Cluster, ClusterEnvironment
from tfdist.cluster.rendezvous import Agreement, rendezvous

__all__ = ["Agreement", "Cluster", "ClusterEnvironment", "rendezvous"]
