import torch

from mcore.observe import TrainState

FULL = TrainState(
    step=5,
    consumed_train_samples=640,
    skipped_train_samples=7,
    consumed_valid_samples=32,
    floating_point_operations_so_far=1.5e20,
    do_train=True,
    do_valid=True,
)


def test_fields_become_tensors_without_dimensions():
    saved = FULL.state_dict()
    assert {name: t.dtype for name, t in saved.items()} == {
        "step": torch.int64,
        "consumed_train_samples": torch.int64,
        "skipped_train_samples": torch.int64,
        "consumed_valid_samples": torch.int64,
        "floating_point_operations_so_far": torch.float64,
        "do_train": torch.bool,
        "do_valid": torch.bool,
        "do_test": torch.bool,
    }
    assert all(t.shape == () and t.device.type == "cpu" for t in saved.values())


def test_a_round_trip_keeps_values_and_types():
    loaded = TrainState()
    loaded.load_state_dict(FULL.state_dict())
    assert loaded == FULL
    assert [type(loaded.step), type(loaded.do_train)] == [int, bool]


def test_missing_keys_keep_their_defaults_and_others_are_ignored():
    state = TrainState()
    state.load_state_dict({"step": 7, "what is this": torch.tensor(1)})
    assert state == TrainState(step=7)


def test_distributed_checkpoints_take_it(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    assert isinstance(FULL, Stateful)
    dcp.save({"train_state": FULL}, checkpoint_id=str(tmp_path), no_dist=True)
    loaded = TrainState()
    dcp.load({"train_state": loaded}, checkpoint_id=str(tmp_path), no_dist=True)
    assert loaded == FULL
