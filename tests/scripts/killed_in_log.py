"""Train a tiny model with checkpoints in argv[2], until the process dies by SIGKILL halfway through a line of its
metrics file: the line of step argv[1].
"""

import os
import signal
import sys

from hf_lowprec.metrics_file import MetricsWriter, StepRecord
from tests.support.training.tiny_trainer import trained

append = MetricsWriter.append


def append_or_die(self: MetricsWriter, record: StepRecord) -> None:
    if record.step == int(sys.argv[1]):
        write = os.write

        def write_half(file: int, content: bytes) -> None:
            write(file, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        os.write = write_half
    append(self, record)


MetricsWriter.append = append_or_die
trained(sys.argv[2], optim="adamw_bf16_kahan", logging_steps=1, save_strategy="steps", save_steps=4, max_steps=8)
