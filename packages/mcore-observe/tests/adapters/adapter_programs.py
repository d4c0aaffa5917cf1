"""Trainers of other libraries with their adapters, for ``test_adapters``, which calls ``main``.

The libraries are loaded once; each scenario is a fork, or two that are the ranks of a job. What it
prints goes to ``NAME.RANK.txt``, what it returns to ``NAME.RANK.json``.
"""

import contextlib
import ctypes
import doctest
import gc
import json
import os
import signal
import sys
import time
import warnings
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from mcore.observe import MemorySink, StragglerDetector
from mcore.observe.adapters import lightning as for_lightning
from mcore.observe.adapters import torchtitan as for_torchtitan
from mcore.observe.adapters import transformers as for_transformers

SLOW_S = 0.003  # the second rank's forward pass takes at least as long
WAIT_S = 0.05
LIBRARIES = {}  # all modules that were loaded before the first fork, but for those of the package
QUICK = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Kept(MemorySink):
    """Keeps metrics, and writes how the run ended into a file."""

    def __init__(self, path):
        super().__init__()
        self.path = Path(path)

    def close(self, status="FINISHED"):
        with self.path.open("a") as file:
            file.write(f"{status}\n")


def rank():
    return int(os.environ.get("RANK", 0))


def of_ranks():
    """Return what the last report says about each rank's ranges."""
    report = StragglerDetector().last_report
    if report is None:
        return None
    return {name: [stats.sum_ms for stats in report.sections[name]] for name in ("compute", "data")}


class Line(torch.nn.Module):
    """A linear model with the interface that transformers expects."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fails_at, self.calls = fails_at, 0

    def forward(self, input_ids, labels):
        self.calls += self.training
        if self.calls == self.fails_at:
            raise RuntimeError("the model failed")
        if rank() == 1:
            time.sleep(SLOW_S)
        found = self.layer(input_ids.float()).squeeze(-1)
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}


def rows(count):
    made = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(0, 9, (4,), generator=made), "labels": torch.tensor(0.5)}
        for _ in range(count)
    ]


def hf_trainer(folder, callback, model=None, count=22, made_by=Trainer, **options):
    chosen = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        **options,
    }
    args = TrainingArguments(str(folder / "hf"), **chosen)
    callbacks = callback if isinstance(callback, list) else [callback]
    return made_by(
        model or Line(), args, train_dataset=rows(count), eval_dataset=rows(4), callbacks=callbacks
    )


def hf_train(folder):
    """Train, evaluate, continue from a checkpoint, and train another run."""
    often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    kept = Kept(folder / "hf_train.status")
    callback = for_transformers.ObserveCallback(folder / "hf_run", sinks=[kept], tensorboard=True)
    trainer = hf_trainer(folder, callback, **often)
    trainer.train()
    trainer.evaluate()
    history = trainer.state.log_history
    trainer.train()  # a run of its own
    callback.close()
    callback.close("FAILED")  # too late
    again = for_transformers.ObserveCallback(folder / "hf_run", seq_length=4)
    other = hf_trainer(folder, again, **often, logging_strategy="steps")
    other.train(resume_from_checkpoint=str(folder / "hf" / "checkpoint-3"))
    return {
        "history": history,
        "resumed": other.state.log_history,
        "consumed": again.run_log.train_state.consumed_train_samples,
        "params": again.run_log.cfg.trainer["learning_rate"],
        "hooks": len(trainer.model._forward_hooks),
    }


class WaitsForTheDevice(Trainer):
    """Waits where the trainer reads the losses of its steps."""

    def log(self, *args, **kwargs):
        time.sleep(WAIT_S)
        super().log(*args, **kwargs)


class OtherCallback(TrainerCallback):
    """Logs the number of a step as its loss, and adds a callback after the second step."""

    def __init__(self, added=None):
        self.trainer, self.added = None, added

    def on_step_end(self, args, state, control, **others):
        if self.added is not None and state.global_step == 2:
            self.trainer.add_callback(self.added)
        self.trainer.log({"loss": float(state.global_step)})


def hf_odd(folder):
    """Wait for a device, go on with another batch and log early, and join training late."""
    kept = [Kept(folder / "hf_odd.status") for _ in range(3)]
    callbacks = [
        for_transformers.ObserveCallback(folder / f"hf_odd{number}", sinks=[sink], straggler=False)
        for number, sink in enumerate(kept)
    ]
    saves = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    hf_trainer(folder / "odd", callbacks[0], made_by=WaitsForTheDevice, **saves).train()
    batches = []
    for others, options in (
        ([OtherCallback(), callbacks[1]], {"per_device_train_batch_size": 4}),
        ([OtherCallback(callbacks[2])], {"max_steps": 4}),
    ):
        trainer = hf_trainer(folder / "odd", others, count=48, logging_strategy="no", **options)
        others[0].trainer = trainer
        checkpoint = folder / "odd" / "hf" / "checkpoint-3"
        trainer.train(resume_from_checkpoint=str(checkpoint) if len(others) > 1 else None)
        batches.append(trainer._train_batch_size)
    return {
        "batches": batches,
        "losses": [{s: v.get("loss") for s, v in sink.steps.items()} for sink in kept],
        "consumed": [each.run_log.train_state.consumed_train_samples for each in callbacks],
    }


def hf_device(folder):
    """Two steps on the CPU and on the stand-in accelerator, which accelerate takes by its name."""
    from accelerate.state import AcceleratorState

    import standin
    from standin.guard import find_problem

    if find_problem() is not None:
        return {}
    found = {}
    for place in ("cpu", str(standin.switch_on(0))):
        os.environ["ACCELERATE_TORCH_DEVICE"] = place
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        kept = MemorySink()
        callback = for_transformers.ObserveCallback(folder / f"hf_{place}", sinks=[kept])
        options = {"max_steps": 2, "logging_steps": 1, "use_cpu": place == "cpu"}
        trainer = hf_trainer(folder, callback, **options, dataloader_pin_memory=False)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[place] = [str(trainer.model.layer.weight.device), losses, kept.steps]
    return found


def hf_fails(folder):
    """Fail while training, which the program gets over."""
    callback = for_transformers.ObserveCallback(
        folder / "hf_fails", sinks=[Kept(folder / "hf_fails.status")], straggler=False
    )
    with contextlib.suppress(RuntimeError):
        hf_trainer(folder, callback, Line(fails_at=6)).train()
    return {}


def hf_ranks(folder):
    """Train on two ranks, one of them slow."""
    kept = Kept(folder / f"hf_ranks.{rank()}.status")
    callback = for_transformers.ObserveCallback(
        folder / "hf_ranks", sinks=[kept], straggler={"report_every_s": 1e-9}
    )
    trainer = hf_trainer(folder, callback, count=88, max_steps=17, logging_steps=17)
    trainer.train()
    return {
        "steps": kept.steps,
        "consumed": callback.run_log.train_state.consumed_train_samples,
        "losses": [one["loss"] for one in trainer.state.log_history if "loss" in one],
        "ranks": of_ranks(),
    }


class Module(pl.LightningModule):
    """A linear model that keeps its losses."""

    def __init__(self, interrupt=None, rate=0.1):
        super().__init__()
        self.save_hyperparameters("rate")
        self.layer = torch.nn.Linear(4, 1)
        self.interrupt = interrupt
        self.losses = []

    def training_step(self, batch, index):
        if self.interrupt is not None and self.global_step == 2:
            self.interrupt()
        if rank() == 1:
            time.sleep(SLOW_S)
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss_of(batch))

    def log_test(self, batch, index):
        self.log("test_loss", self.loss_of(batch))

    test_step = log_test  # no test of this suite

    def loss_of(self, batch):
        inputs, labels = batch
        return ((self.layer(inputs).squeeze(-1) - labels) ** 2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.rate)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": halved, "interval": "step"},
        }


def loader(count=22):
    made = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(count, 4, generator=made), torch.randn(count, generator=made)
    )
    return torch.utils.data.DataLoader(data, batch_size=2)


def pl_fit(folder):
    """Fit, go on in the same run, test, and continue from a checkpoint."""
    kept = Kept(folder / "pl_fit.status")
    callback = for_lightning.ObserveCallback(folder / "pl_run", log_every=1, sinks=[kept])
    options = {**QUICK, "accumulate_grad_batches": 2, "limit_val_batches": 1}
    module = Module()
    trainer = pl.Trainer(
        max_steps=3,
        callbacks=[callback],
        logger=callback.logger,
        log_every_n_steps=1,
        val_check_interval=4,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(folder / "pl.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    first = {str(step): dict(values) for step, values in kept.steps.items()}
    callback.close()
    alone = Kept(folder / "pl_alone.status")
    again = for_lightning.ObserveCallback(folder / "pl_run", log_every=1, sinks=[alone])
    other = pl.Trainer(
        max_steps=5, callbacks=[again], logger=False, enable_checkpointing=False, **options
    )
    # Under 2.6 Lightning has no such argument and reads everything.
    whole = {"weights_only": False} if "weights_only" in signature(other.fit).parameters else {}
    other.fit(Module(), loader(), loader(), ckpt_path=folder / "pl.ckpt", **whole)
    return {
        "losses": module.losses,
        "steps": first,
        "resumed": alone.steps,
        "consumed": again.run_log.train_state.consumed_train_samples,
        "params": again.run_log.cfg.trainer,
        "folders": sorted(path.name for path in (folder / "pl_run").iterdir()),
    }


def pl_fails(folder):
    """Be interrupted while fitting, in four ways."""

    def fail():
        raise RuntimeError("the module failed")

    def stop():
        raise KeyboardInterrupt

    def kill():
        os.kill(os.getpid(), signal.SIGTERM)

    for name, interrupt in (("failed", fail), ("stopped", stop), ("killed", kill)):
        sinks = [Kept(folder / f"pl_{name}.status")]
        callback = for_lightning.ObserveCallback(folder / f"pl_{name}", sinks=sinks)
        trainer = pl.Trainer(max_steps=4, callbacks=[callback], logger=False, **QUICK)
        with contextlib.suppress(RuntimeError, SystemExit):
            trainer.fit(Module(interrupt), loader())
    logger = for_lightning.ObserveLogger(
        folder / "pl_logger", sinks=[Kept(folder / "pl_logger.status")]
    )
    trainer = pl.Trainer(max_steps=4, logger=logger, log_every_n_steps=1, **QUICK)
    with contextlib.suppress(RuntimeError):
        trainer.fit(Module(fail), loader())
    return {}


def pl_ranks(folder):
    """Fit on two ranks, one of them slow."""
    kept = Kept(folder / f"pl_ranks.{rank()}.status")
    callback = for_lightning.ObserveCallback(
        folder / "pl_ranks", log_every=17, sinks=[kept], straggler={"report_every_s": 1e-9}
    )
    module = Module()
    trainer = pl.Trainer(
        max_steps=17,
        callbacks=[callback],
        logger=callback.logger,
        strategy="ddp",
        devices=2,
        log_every_n_steps=17,
        **QUICK,
    )
    trainer.fit(module, loader(88))
    return {
        "steps": kept.steps,
        "consumed": callback.run_log.train_state.consumed_train_samples,
        "losses": module.losses,
        "ranks": of_ranks(),
    }


class Values(Module):
    """Logs values in every way that Lightning has."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("synced", loss, on_epoch=True, sync_dist=True)
        self.log("of rank 0", float(index), rank_zero_only=True)
        if self.trainer.is_global_zero:
            self.logger.log_metrics({"by hand": float(index)}, step=self.global_step)
            for logger in self.trainer.loggers[1:]:
                logger.log_metrics({"by hand": float(index)}, step=self.global_step)
        return loss

    def on_train_epoch_end(self):
        self.log("at the end", float(self.current_epoch))

    test_step = Module.log_test


def pl_values(folder, strategy="auto"):
    """Fit and test with Lightning's CSVLogger, to which the callback adds its own logger."""
    name = f"pl_values{rank() if strategy == 'ddp' else ''}"
    root = folder / f"pl_values_{strategy}"
    kept = Kept(folder / f"{name}.status")
    callback = for_lightning.ObserveCallback(root / "run", log_every=1, sinks=[kept])
    csv = pl.loggers.CSVLogger(root / "csv", name="", version="")
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=2,
        callbacks=[callback, pl.callbacks.LearningRateMonitor("step")],
        logger=csv,
        log_every_n_steps=1,
        strategy=strategy,
        devices=2 if strategy == "ddp" else 1,
        **QUICK,
    )
    trainer.fit(Values(), loader(24), loader(8))
    trainer.test(Values(), loader(8), verbose=False)
    return {"steps": kept.steps}


def pl_values_ranks(folder):
    """The same on two ranks."""
    return pl_values(folder, "ddp")


def titan_processor(log_freq):
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed import ParallelDims

    sizes = dict.fromkeys(("dp_shard", "cp", "tp", "pp", "ep"), 1)
    size = torch.distributed.get_world_size()
    dims = ParallelDims(dp_replicate=size, world_size=size, **sizes)
    processor = MetricsProcessor.Config(log_freq=log_freq).build(parallel_dims=dims)
    processor.num_flops_per_token = 100
    return processor


def titan_log(folder):
    """Have a real processor log, twice; only what reads the memory of a GPU is replaced."""
    import torchtitan.components.metrics as metrics

    torch.distributed.init_process_group("gloo")
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="NVIDIA A100",
        get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    model = torch.nn.Linear(4, 1)
    found = {}
    for first, last in ((1, 6), (5, 8)):  # the second continues from a checkpoint of step 4
        kept = Kept(folder / f"titan.{rank()}.status")
        processor = titan_processor(2)
        processor.logger = for_torchtitan.ObserveLogger(
            folder / "titan", model=model, seq_length=16, sinks=[kept]
        )
        for step in range(first, last + 1):
            processor.ntokens_since_last_log += 64
            processor.data_loading_times.append(0.001)
            model(torch.ones(2, 4))
            if step in (3, 5):  # a validation between two lines, also before the first one
                processor.log_validation(float(step), step)
            if processor.should_log(step):
                more = {"n_tokens_seen": 64 * step, "lr": 1e-3}
                processor.log(step, 10.0 + first / step, 3.0, 1.5, more)
                processor.logger.log({"loss_metrics/global_avg_loss": 0.0, "again": 1.0}, step)
        processor.log_validation(1.0, last)
        with contextlib.suppress(RuntimeError):
            try:
                if first > 1:
                    raise RuntimeError("training failed")
            finally:
                processor.logger.close()
        odd = Kept(folder / "titan_odd.status")
        logger = for_torchtitan.ObserveLogger(folder / f"odd{first}", seq_length=16, sinks=[odd])
        for step, seen in ((0, 0), (1, 64), (2, 128), (4, None), (2, 128), (3, 192)):
            loss = {"loss_metrics/global_avg_loss": float(step), "n_tokens_seen": seen}
            logger.log(loss, step)
        logger.close()
        found[first] = {
            "odd": odd.steps,
            "steps": kept.steps,
            "consumed": processor.logger.run_log.train_state.consumed_train_samples,
        }
    return found | {"ranks": of_ranks()}


def titan_device(folder):
    """Two steps of a model on the CPU and on the stand-in, whose memory the processor measures.

    torchtitan's trainer needs triton. Its processor has chosen a device when it was imported.
    """
    import torchtitan.components.metrics as metrics

    import standin
    from standin.guard import find_problem

    if find_problem() is not None:
        return {}
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    device, found = standin.switch_on(0), {}
    metrics.device_type, metrics.device_module = device.type, torch.standin
    for place in ("cpu", str(device)):
        torch.manual_seed(0)
        model, kept, losses = torch.nn.Linear(4, 1).to(place), MemorySink(), []
        processor = titan_processor(1)
        processor.logger = for_torchtitan.ObserveLogger(
            folder / f"titan_{place}", model=model, sinks=[kept]
        )
        for step in (1, 2):
            processor.ntokens_since_last_log += 64
            processor.data_loading_times.append(0.001)
            loss = model(torch.full((2, 4), 1.0 * step, device=place)).square().mean()
            losses.append(loss.item())
            processor.log(step, losses[-1], losses[-1], 1.0, {"n_tokens_seen": 64 * step})
            processor.logger.log({"loss_metrics/global_avg_loss": loss, "tensor": loss}, step)
        processor.logger.close()
        assert [one["tensor"] for one in kept.steps.values()] == losses
        found[place] = [str(model.weight.device), losses, kept.steps]
    return found


def pl_device(folder):
    """Two steps on the CPU and on the stand-in accelerator; Lightning has no name for it."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    import standin
    from standin.guard import find_problem

    class Own(CPUAccelerator):
        def setup_device(self, device):
            pass

    if find_problem() is not None:
        return {}
    device, found = standin.switch_on(0), {}
    for place in ("cpu", str(device)):
        torch.manual_seed(0)
        model, kept = Module(), MemorySink()
        run = for_lightning.ObserveCallback(folder / f"pl_{place}", sinks=[kept])
        chosen = {"strategy": SingleDeviceStrategy(place, Own()), "logger": False}
        progress = {"enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_steps=2, log_every_n_steps=1, callbacks=[run], enable_checkpointing=False,
            **chosen, **progress,
        )  # fmt: skip
        trainer.fit(model, loader(4))
        found[place] = [str(trainer.strategy.root_device), model.losses, kept.steps]
    return found


SCENARIOS = {
    hf_train: 1, hf_odd: 1, hf_fails: 1, hf_ranks: 2, hf_device: 1,
    pl_fit: 1, pl_fails: 1, pl_ranks: 2, pl_values: 1, pl_values_ranks: 2, titan_log: 2,
    pl_device: 1, titan_device: 1,
}  # fmt: skip


def keep_libraries():
    """Keep the libraries out of the teardown of a fork, which takes longer than its scenario."""
    for name in LIBRARIES:
        sys.modules.pop(name, None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(LIBRARIES))
    if sys.platform == "linux":  # nor does torch take back each of its operators
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


def be_a_rank(scenario, folder, index, size, port):
    """Run a scenario in a fork; the interpreter's end is part of it."""
    name = f"{scenario.__name__}.{index}"
    output = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0}
    place["TORCHELASTIC_RUN_ID"] = "adapters"
    if size > 1 or scenario is titan_log:
        os.environ.update({name: str(value) for name, value in place.items()})
    # A fork gets another pool of threads. The backward's threads of two devices, which both request
    # it, may find none while one of them makes it.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = scenario(folder)
    (folder / f"{name}.json").write_text(json.dumps(result))


def main(folder, ports):
    """Run the examples, then the scenarios side by side; return how many failed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for module in (for_lightning, for_torchtitan, for_transformers):
        if doctest.testmod(module).failed:
            return 1
    gc.freeze()  # else the end of each child collects what the libraries made, in two seconds
    ours = ("mcore", "sys", "builtins", "__main__")
    LIBRARIES.update({n: m for n, m in sys.modules.items() if n.partition(".")[0] not in ours})
    children = {}
    for scenario, port in zip(SCENARIOS, ports, strict=True):
        size = SCENARIOS[scenario]
        for index in range(size):
            child = os.fork()
            if not child:
                be_a_rank(scenario, folder, index, size, port)
                sys.exit(0)
            children[child] = f"{scenario.__name__}.{index}"
    failed = [name for child, name in children.items() if os.waitpid(child, 0)[1]]
    for name in failed:
        sys.stderr.write(f"--- {name}\n{(folder / f'{name}.txt').read_text()[-4000:]}")
    return len(failed)
