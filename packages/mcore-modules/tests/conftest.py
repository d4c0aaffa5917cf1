"""What the tests of graphs share: a recording runner, and graphs on the CPU.

Graphs on the CPU keep the memory rules of CUDA graphs. A replay runs what was recorded, on the
memory of the capture. Random numbers of a generator that was not registered are those of the
capture for ever. Memory that a capture freed belongs to its pool: in the worst case it is that
which graphs captured later keep, so a replay spoils all of it.
"""

import logging
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from mcore.modules.graphs import CheckedGraph, EagerGraphRunner, TorchGraphRunner
from mcore.parallel.rng import (
    get_all_rng_states,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from standin.plugin import accelerator_fixture, device_fixture, on_each_device  # noqa: F401


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_in(value):
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


def held(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


class Recorder(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = {storage(tensor) for tensor in tensors_in((args, kwargs))}
        state = torch.get_rng_state()
        stream = self.graph.stream_of(state)
        out = func(*args, **kwargs)
        made = [t for t in tensors_in(out) if storage(t) not in inputs]
        is_random = not torch.equal(state, torch.get_rng_state())
        self.graph.add(func, args, kwargs, out, made, (stream, state) if is_random else None)
        return out


class CpuGraph:
    def __init__(self, device):
        self.device = device
        self.names = {}
        self.steps = []
        self.replays = 0
        self.is_reset = False
        device.graphs.append(weakref.ref(self))

    def register_generator_state(self, generator):
        [name] = [name for name, g in get_all_rng_states().items() if g is generator]
        self.names[name] = generator

    def stream_of(self, state):
        for name in self.names:
            if torch.equal(get_all_rng_states()[name].get_state(), state):
                return name
        return None

    def add(self, func, args, kwargs, out, made, random):
        args, kwargs, out = tree_map(held, (args, kwargs, out))
        self.steps.append((func, args, kwargs, out, bool(made), random))

    def replay(self):
        assert not self.is_reset
        self.replays += 1
        for graph in self.device.captured_after(self):
            for tensor in graph.memory():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        for func, args, kwargs, out, makes, random in self.steps:
            with torch.no_grad(), self.numbers(random):
                result = func(*args, **kwargs)
                if makes:
                    for static, fresh in zip(tensors_in(out), tensors_in(result), strict=True):
                        static.copy_(fresh)

    @contextmanager
    def numbers(self, random):
        if random is None:
            yield
        elif random[0] is not None:
            with get_cuda_rng_tracker().fork(random[0]):
                yield
        else:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(random[1])
                yield

    def memory(self):
        """What a graph wrote in its last replay and may read later."""
        return [tensor for *_, out, makes, _ in self.steps if makes for tensor in tensors_in(out)]

    def reset(self):
        self.is_reset = True
        self.steps = []


class CpuGraphs:
    """A device for ``TorchGraphRunner``; keeps what it did."""

    def __init__(self):
        self.graphs = []
        self.pools = {}
        self.warm_ups = 0

    def graph(self):
        return CpuGraph(self)

    def pool(self):
        handle = len(self.pools)
        self.pools[handle] = []
        return handle

    def warming_up(self):
        self.warm_ups += 1
        return nullcontext()

    @contextmanager
    def capturing(self, graph, pool):
        self.pools[pool].append(weakref.ref(graph))
        with Recorder(graph):
            yield

    @property
    def num_alive(self):
        return sum(graph() is not None and not graph().is_reset for graph in self.graphs)

    def captured_after(self, graph):
        """Graphs whose memory may be what this one uses while it runs: later ones in its pool.

        A backward's own forward came before; a slot's forwards are all captured before its
        backwards, which come in reverse order.
        """
        for members in self.pools.values():
            alive = [member() for member in members if member() is not None]
            if graph in alive:
                return alive[alive.index(graph) + 1 :]
        return []


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
        def replay(call):
            tensors = (*call.args, *call.kwargs.values())
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            is_first = call.is_first_microbatch
            self.events.append(("replay", spec.order, spec.microbatch, is_first, shapes))
            return spec.fn(*call.args, **call.kwargs)

        return replay

    @property
    def replays(self):
        return [event for event in self.events if event[0] == "replay"]


@pytest.fixture
def runner():
    return RecordingRunner()


@pytest.fixture(autouse=True)
def same_draws():
    """Random numbers are those of the test, whatever its worker has run before."""
    torch.manual_seed(0)


@pytest.fixture
def caplog(caplog):
    """The records of this package alone: threads of other tests' libraries may log as well."""
    own = logging.Filter("mcore.modules")
    caplog.handler.addFilter(own)
    yield caplog
    caplog.handler.removeFilter(own)


@pytest.fixture
def seeded():
    """Makes a shared random tracker with streams; afterwards there is a new one without any."""

    def seed(use_cudagraphable_rng=False, **options):
        ranks = {"tp_rank": 0, "ep_rank": 0, "etp_rank": 0}
        model_parallel_cuda_manual_seed(
            1,
            use_cudagraphable_rng=use_cudagraphable_rng,
            force_reset_rng=True,
            **ranks,
            **options,
        )

    state = torch.get_rng_state()
    yield seed
    initialize_rng_tracker(force_reset=True)
    torch.set_rng_state(state)


@pytest.fixture
def cpu_graphs():
    """A device whose graphs are on the CPU."""
    return CpuGraphs()


@pytest.fixture(params=["torch", "eager"])
def checked_runner(request):
    """Each runner that finds on the CPU what would be wrong on a device."""
    if request.param == "eager":
        return EagerGraphRunner()
    return TorchGraphRunner(device=CpuGraphs())
