"""A callback that keeps the FP32 weights with which a Trainer begins."""

from transformers import TrainerCallback

from hf_lowprec import fp32_state_dict


class Beginning(TrainerCallback):
    """Keeps the FP32 estimates before the first step."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.estimates = fp32_state_dict(model, optimizer)
