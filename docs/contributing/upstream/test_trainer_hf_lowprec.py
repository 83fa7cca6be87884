# Copyright 2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

import importlib.util
import unittest

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, is_torch_available, set_seed
from transformers.testing_utils import TestCasePlus, require_torch

if is_torch_available():
    import torch


def require_hf_lowprec(test_case):
    # For testing_utils.py, next to require_torch_optimi
    return unittest.skipUnless(importlib.util.find_spec("hf_lowprec"), "test requires hf_lowprec")(test_case)


@require_hf_lowprec
@require_torch
class TrainerHfLowprecTest(TestCasePlus):
    # Far below half the distance of neighboring BF16 numbers near 0.02, the standard deviation of the weights
    learning_rate = 1e-6

    def _get_trainer(self, arguments=None, **kwargs):
        import hf_lowprec  # noqa: F401  (registers the names)

        set_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        self.before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        tokens = torch.randint(0, 64, (16, 32))
        args = TrainingArguments(
            self.get_auto_remove_tmp_dir(),
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            max_steps=4,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            **(arguments or {}),
        )
        return Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], **kwargs)

    def _weights(self, trainer):
        import hf_lowprec

        weights = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
        return {name: weight.cpu() for name, weight in weights.items()}

    def _assert_equal_weights(self, first, second):
        for name, weight in first.items():
            self.assertTrue(torch.equal(weight, second[name]), name)

    def test_optim_name(self):
        trainer = self._get_trainer({"optim": "adamw_bf16_split"})
        trainer.train()
        self.assertEqual(trainer.model.lm_head.weight.dtype, torch.bfloat16)
        self.assertEqual(trainer.model.model.norm.weight.dtype, torch.float32)
        # A step of Adam is at most (1 - beta1) / sqrt(1 - beta2) = 3.2 times the learning rate. Rounding would be more.
        for name, weight in self._weights(trainer).items():
            moved = (weight - self.before[name]).abs()
            self.assertGreater((moved > 0).float().mean(), 0.9, name)
            self.assertLess(moved.max(), 4 * 3.2 * self.learning_rate, name)

    def test_optimizer_cls_and_kwargs(self):
        import hf_lowprec

        named = self._get_trainer({"optim": "adamw_bf16_split"})
        options = {"lr": self.learning_rate, "seed": named.args.seed}
        given = self._get_trainer(
            optimizer_cls_and_kwargs=hf_lowprec.optimizer_factory("adamw_bf16_split", **options),
            callbacks=[hf_lowprec.LowPrecisionCallback()],
        )
        named.train()
        given.train()
        self._assert_equal_weights(self._weights(named), self._weights(given))

    def test_resume(self):
        whole = self._get_trainer({"optim": "adamw_bf16_sr"})
        whole.train()
        resumed = self._get_trainer({"optim": "adamw_bf16_sr"})
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
        self._assert_equal_weights(self._weights(whole), self._weights(resumed))
