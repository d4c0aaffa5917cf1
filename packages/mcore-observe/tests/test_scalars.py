import torch

from mcore.observe.sinks.scalars import Scalar, Scalars


def test_names_that_repeat_open_a_further_batch():
    scalars = Scalars()
    scalars.add("a", 1.0, versus_samples=True)
    scalars.add("none", None)
    scalars.add_all({"b": torch.tensor(2.0)}, prefix="memory/")
    scalars.add_scalar("a", 3.0, 7)
    scalars.add("c", 4)
    batches, others = scalars.read({"a": torch.tensor(5), ("b", 1): None})
    assert batches == [
        {"a": Scalar(1.0, versus_samples=True), "memory/b": Scalar(2.0)},
        {"a": Scalar(3.0), "c": Scalar(4)},
    ]
    assert others == {"a": 5, ("b", 1): None}
