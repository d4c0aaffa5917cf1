"""Arithmetic of one training step, from the shapes of the model."""

from __future__ import annotations

from pretrain.corpus import VOCABULARY_SIZE
from pretrain.settings import Settings


def training_flops(settings: Settings) -> int:
    """Floating point operations of one step's matrix products, forward and backward, of all ranks.

    Per token and layer, forward: ``24 h^2`` in the linears (input projection ``3h``, output ``h``,
    feed-forward ``4h`` twice, two operations per weight) and ``4 s h`` in the two attention
    products, causal or not; plus ``2 h v`` for the logits, or ``2 h`` for a value. Backward costs
    twice the forward.
    """
    hidden, length = settings.hidden_size, settings.seq_length
    layer = 24 * hidden * hidden + 4 * length * hidden
    num_outputs = 1 if settings.value_head else VOCABULARY_SIZE
    forward = settings.num_layers * layer + 2 * hidden * num_outputs
    return 3 * forward * settings.global_batch_size * length
