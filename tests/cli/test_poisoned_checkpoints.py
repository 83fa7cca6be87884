"""No command, and no resumed training, runs what a file of a checkpoint names when it is unpickled."""

import re
import shutil

import pytest
from typer.testing import CliRunner

from hf_lowprec.cli import app
from tests.support.processes.ranks import run_ranks
from tests.support.training.poisoned_files import poisons, write_poisoned

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "state_dict_type"), [(1, ""), (2, ""), (1, "SHARDED_STATE_DICT"), (1, "FULL_STATE_DICT")]
)
def test_every_file(tmp_path, ranks, state_dict_type):
    """Resumed with a manifest that lists the poisoned files, and read without one."""
    printed = run_ranks("poisoned_checkpoints.py", ranks, str(tmp_path), *filter(None, [state_dict_type]))
    checkpoint, copy, marker, ran = tmp_path / "checkpoint-2", tmp_path / "copy", tmp_path / "marker", []
    tried = [*poisons(checkpoint, marker)]
    assert f"of {len(tried)} poisoned files ran: []" in printed, printed
    if state_dict_type == "SHARDED_STATE_DICT":
        for folder in ("optimizer_0", "pytorch_model_fsdp_0"):
            assert re.search(rf"is damaged: {folder}/\.metadata .* it names io\.open", printed), printed
            assert re.search(rf"is damaged: {folder} .* it names io\.open", printed), printed
    for name, contents in tried:
        write_poisoned(checkpoint, contents, copy)
        for words in (
            ("inspect", copy),
            ("inspect", checkpoint, copy),
            ("export", copy, tmp_path / "exported"),
            ("doctor", copy, "--lr", "1e-3", "--steps", "10"),
            ("estimate", copy),
            ("plot", copy, "-o", tmp_path / "plot.html"),
        ):
            result = CliRunner().invoke(app, [*map(str, words)])
            assert isinstance(result.exception, SystemExit | None), (words, result.exception)
            shutil.rmtree(tmp_path / "exported", ignore_errors=True)
            if marker.exists():
                ran.append((name, words[0]))
                marker.unlink()
    assert ran == []
