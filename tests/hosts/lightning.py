"""Lightning: Trainer with clipping, accumulation, a checkpoint, averages, and FP32 sums under DDP; Fabric as well."""

import copy

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import hf_lowprec
from hf_lowprec.reduction import check_replicas, reduce_in_fp32

OPTIONS = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
FIRST = nn.Sequential(
    nn.Embedding(64, 32), nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64)
)


def cast_copy() -> nn.Module:
    model = copy.deepcopy(FIRST)
    hf_lowprec.cast_model(model)
    return model


def data() -> DataLoader:
    tokens = (torch.arange(64)[:, None] + torch.arange(9)) % 64
    return DataLoader(TensorDataset(tokens[:, :8], tokens[:, 8]), batch_size=8)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = cast_copy()

    def training_step(self, batch, index):
        return cross_entropy(self.model(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        optimizer = hf_lowprec.AdamW(self.parameters(), lr=1e-5, rounding="split")
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self):
        if isinstance(self.trainer.strategy.model, nn.parallel.DistributedDataParallel):
            reduce_in_fp32(self.trainer.strategy.model)

    def on_train_end(self):
        if self.trainer.world_size > 1:
            assert type(self.trainer.strategy.model).__name__ == "FP32MeanDDP"
            check_replicas(self.model, self.trainer.optimizers[0])


class Average(lightning.Callback):
    """The average of guides/hosts.md."""

    def on_train_start(self, trainer, module):
        self.average = hf_lowprec.AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def on_train_batch_end(self, trainer, module, *others):
        if trainer.global_step > self.average.n_averaged:  # not within accumulated batches
            self.average.update_parameters(module, trainer.optimizers[0])


def trained(steps: int, resume: str | None = None, **options):
    """The FP32 weights after some steps, and the trainer."""
    module = Module()
    options = {"enable_checkpointing": False, **OPTIONS, **options}
    trainer = lightning.Trainer(max_steps=steps, gradient_clip_val=1.0, accumulate_grad_batches=2, **options)
    trainer.fit(module, data(), ckpt_path=resume)
    return hf_lowprec.fp32_state_dict(module, trainer.optimizers[0]) if trainer.optimizers else {}, trainer


def share_moved(values) -> float:
    moved = [(values[f"model.{name}"] != first).flatten() for name, first in FIRST.named_parameters()]
    return torch.cat(moved).float().mean().item()


# Eight batches make four steps, so the checkpoint is at the end of an epoch.
average = Average()
save = ModelCheckpoint("saved", every_n_train_steps=4, save_top_k=-1)
straight, trainer = trained(12, callbacks=[save, average], enable_checkpointing=True)
assert trainer.global_step == 12 and share_moved(straight) > 0.9
averages = average.average.module.state_dict()
assert {value.dtype for value in averages.values()} == {torch.float32} and share_moved(averages) > 0.9
resumed, _ = trained(12, resume="saved/epoch=0-step=4.ckpt")
assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
try:
    trained(1, precision="bf16-true")
except RuntimeError as error:
    assert "Remove that line" in str(error) and "Lightning's `precision`" in str(error), error
else:
    raise AssertionError("precision='bf16-true' has converted the norms")
trained(2, strategy="ddp_fork", devices=2)


class Fp32Sums(DDPStrategy):
    def setup_module(self, module):
        ddp = super().setup_module(module)
        reduce_in_fp32(ddp)
        return ddp


def train(fabric: lightning.Fabric) -> None:
    model = cast_copy()
    model, optimizer = fabric.setup(model, hf_lowprec.AdamW(model.parameters(), lr=1e-5, rounding="split"))
    for tokens, label in fabric.setup_dataloaders(data()):
        fabric.backward(cross_entropy(model(tokens).float(), label))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    check_replicas(model.module)
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    exact = {name: value.clone() for name, value in hf_lowprec.fp32_state_dict(model.module, optimizer).items()}
    fabric.load("fabric.ckpt", {"model": model, "optimizer": optimizer})
    loaded = hf_lowprec.fp32_state_dict(model.module, optimizer)
    assert all(torch.equal(value, loaded[name]) for name, value in exact.items())


lightning.Fabric(accelerator="cpu", devices=2, strategy=Fp32Sums(start_method="fork")).launch(train)
