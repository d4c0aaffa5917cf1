"""The events that a resumed run keeps."""

import socket

import pytest

from mcore.observe import RunLog
from mcore.observe.sinks.tensorboard import forget_later_events

pytest.importorskip("tensorboard")


def points(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


@pytest.fixture
def folder(tmp_path):
    """Two starts: one up to step 5 with batches of 100, one that continues from 3 with 150."""
    from torch.utils.tensorboard import SummaryWriter

    for first, samples in ((1, 0), (4, 300)):
        writer = SummaryWriter(str(tmp_path), filename_suffix=str(first))
        for step in range(first, 6):
            samples += 100 if first == 1 else 150
            writer.add_scalar("loss", step, step)
            writer.add_scalar("loss vs samples", step, samples)
            writer.add_scalar("only vs samples", step, samples)
        writer.close()
        # Files of the same second are sorted by the numbers of their writers as text.
        (path,) = tmp_path.glob(f"*{socket.gethostname()}*")
        path.rename(tmp_path / f"events.out.tfevents.{first}")
    return tmp_path


def test_each_axis_is_kept_up_to_the_checkpoint(folder):
    last = max(folder.iterdir())
    last.write_bytes(last.read_bytes()[:-5])  # a killed process leaves an incomplete last record
    forget_later_events(folder, 4)
    assert points(folder, "loss") == [(1, 1), (2, 2), (3, 3), (4, 4), (4, 4)]
    samples = points(folder, "loss vs samples")
    assert samples == [(100, 1), (200, 2), (300, 3), (400, 4), (450, 4)]


def test_a_file_without_later_steps_is_left_alone(folder):
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    forget_later_events(folder, 5)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    forget_later_events(folder / "nothing", 5)


def test_the_hparams_tab_shows_the_settings_and_all_scalars(tmp_path):
    """Read by TensorBoard's own plugin."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import backend_context

    with RunLog(tmp_path, batch_size=8, log_every=1, tensorboard=True) as log:
        log.log_step({"loss": 2.5})
        log.tracker("tensorboard").add_text("note", "live")
        with pytest.raises(ValueError, match="no tracker 'wandb': set wandb_project"):
            log.tracker("wandb")
        with pytest.raises(ValueError, match="give one of"):
            log.tracker("tensorbord")
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    multiplexer.Reload()
    assert multiplexer.PluginRunToTagToContent("text")["."].keys() == {"note/text_summary"}
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    asked = RequestContext()
    known = context.hparams_metadata(asked, ""), context.hparams_from_data_provider(asked, "", 100)
    shown = context.experiment_from_metadata(asked, "", True, *known)
    sizes = [one for one in shown.hparam_infos if one.name == "train.micro_batch_size"]
    assert [value.string_value for one in sizes for value in one.domain_discrete.values] == ["8"]
    assert "loss" in {one.name.tag for one in shown.metric_infos}
