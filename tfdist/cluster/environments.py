"""The environments that `Cluster.detect` asks, in order. A new scheduler is one entry here."""

from tfdist.cluster.base import ClusterEnvironment
from tfdist.cluster.kubernetes import KubernetesEnvironment
from tfdist.cluster.local import LocalEnvironment
from tfdist.cluster.mpi_environment import MPIEnvironment
from tfdist.cluster.slurm import SlurmEnvironment
from tfdist.cluster.tf_config import TFConfigEnvironment

ENVIRONMENTS: tuple[ClusterEnvironment, ...] = (
    TFConfigEnvironment(),
    KubernetesEnvironment(),
    SlurmEnvironment(),  # before MPI, which srun may serve as well
    MPIEnvironment(),
    LocalEnvironment(),  # always present, so it stays last
)
