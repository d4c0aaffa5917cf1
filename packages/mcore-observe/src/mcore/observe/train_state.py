"""How far training has come: the part of the state that checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = ["TrainState"]

_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


@dataclass
class TrainState:
    """Counters of a run. It is ``Stateful``: distributed checkpoints save and load it.

    Attributes:
        step: Steps done.
        consumed_train_samples: Samples trained on.
        skipped_train_samples: Samples passed over.
        consumed_valid_samples: Samples validated on.
        floating_point_operations_so_far: Operations of the whole job.
        do_train: Training takes place.
        do_valid: Validation takes place.
        do_test: Testing takes place.

    Example:
        >>> TrainState(step=5).state_dict()["step"]
        tensor(5)
    """

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: float = 0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return one CPU tensor without dimensions for each field.

        Returns:
            int64 for counters, float64 for operations, bool for flags.

        Example:
            >>> TrainState().state_dict()["floating_point_operations_so_far"].dtype
            torch.float64
        """
        return {
            field.name: torch.tensor(getattr(self, field.name), dtype=_DTYPES[str(field.type)])
            for field in fields(self)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the fields that are there.

        Args:
            state_dict: Tensors of one element, or numbers, by field. A field that is missing
                gets its default; other keys are ignored.

        Example:
            >>> state = TrainState()
            >>> state.load_state_dict({"step": torch.tensor(7), "unknown": torch.tensor(1)})
            >>> state.step
            7
        """
        for field in fields(self):
            value = state_dict.get(field.name, field.default)
            plain = value.item() if isinstance(value, torch.Tensor) else value
            setattr(self, field.name, plain)
