"""Workers hear of each other while they train: heartbeats, who is lost or stuck, and when all stop."""

from tfdist.liveness.judge import Limits, Verdict
from tfdist.liveness.monitor import Monitor
from tfdist.liveness.pulse import Pulse
from tfdist.liveness.stops import Stops

__all__ = ["Limits", "Monitor", "Pulse", "Stops", "Verdict"]
