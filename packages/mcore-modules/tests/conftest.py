"""What the tests of graphs share: a runner that records what is captured and replayed."""

import pytest

from mcore.modules.graphs import CheckedGraph


class RecordingRunner:
    """Runs layers eagerly, checks shapes, and keeps a list of events.

    The events are ``("capture", order, microbatch)`` for each spec, and ``("replay", order,
    microbatch, is_first_microbatch, shapes)`` for each call that passes the checks.
    """

    name = "recording"

    def __init__(self):
        self.events = []

    def is_available(self, device):
        return True

    def capture(self, specs, *, num_warmup_iters=3, allow_unused_input=False):
        self.events += [("capture", spec.order, spec.microbatch) for spec in specs]
        return [CheckedGraph(spec, self._replay_of(spec), strict=False) for spec in specs]

    def _replay_of(self, spec):
        def replay(args, kwargs, controls):
            shapes = tuple(tuple(tensor.shape) for tensor in (*args, *kwargs.values()))
            is_first = controls.get("is_first_microbatch")
            self.events.append(("replay", spec.order, spec.microbatch, is_first, shapes))
            return spec.fn(*args, **kwargs)

        return replay

    @property
    def replays(self):
        return [event for event in self.events if event[0] == "replay"]


@pytest.fixture
def runner():
    return RecordingRunner()
