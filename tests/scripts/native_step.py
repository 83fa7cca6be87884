"""Step with `native` and with `auto`, and print as JSON how that went. Arguments change the process first."""

import json
import os
import pwd
import sys
import warnings

import torch

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.backends.c import compiler as c_compiler


def without_passwd_entry() -> None:
    os.environ.pop("HOME", None)
    if os.geteuid() == 0:
        os.setuid(54321)
    if os.geteuid() == 54321:
        return

    def missing(uid):
        raise KeyError(uid)

    pwd.getpwuid = missing  # an ordinary user cannot become one that has no entry


def impatient() -> None:
    c_compiler.TIMEOUT = 1.0


def trained(backend: str, **options) -> torch.Tensor:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(100).bfloat16())
    optimizer = AdamW([param], lr=1e-2, backend=backend, **options)
    for _ in range(3):
        param.grad = torch.randn(100).bfloat16()
        optimizer.step()
    return param.detach()


if __name__ == "__main__":
    for change in sys.argv[1:]:
        globals()[change]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trained("native")
            error = ""
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
        equal = torch.equal(trained("auto"), trained("eager"))
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    print(json.dumps({"error": error, "auto_is_eager": equal, "warnings": messages}))
