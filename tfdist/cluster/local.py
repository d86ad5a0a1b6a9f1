"""The fallback environment: one worker, on this machine, with no peers."""

from collections.abc import Mapping

from tfdist.cluster.base import Cluster, ClusterEnvironment


class LocalEnvironment(ClusterEnvironment):
    """A process that nobody told about a cluster."""

    @property
    def name(self) -> str:
        """The name for messages."""
        return "local"

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Always true: this is the last one asked."""
        return True

    def read(self, environ: Mapping[str, str]) -> Cluster:
        """Returns `Cluster.local()`."""
        return Cluster.local()
