"""Where in the data a training stands."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Position:
    """The next global batch: with the seed it says everything that is needed to go on with the same data.

    Attributes:
        epoch: passes over the data that are done.
        step: global batches of this epoch that are done.
        seed: seed of the shuffles.
    """

    epoch: int = 0
    step: int = 0
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"Position: {field.name}={value!r} has to be an integer of at least 0")

    def advance(self, steps: int) -> "Position":
        """Returns the position `steps` global batches on, in the same epoch."""
        return dataclasses.replace(self, step=self.step + steps)

    def next_epoch(self) -> "Position":
        """Returns the beginning of the next epoch."""
        return dataclasses.replace(self, epoch=self.epoch + 1, step=0)

    def to_json(self) -> dict[str, int]:
        """Returns the position as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Position":
        """Returns what `to_json` gave; raises ValueError or TypeError on anything else."""
        return cls(**value)
