"""Installs each host of hosts.toml in an environment of its own, then this package, and trains with the host's code.

`python -m tests.hosts [NAME…]` takes all hosts, or those named. It fails if a host fails, or if installing this package
changes the version of anything in the host's environment. Rows of hosts that pass are written to docs/guides/hosts.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "guides" / "hosts.md"
ENVIRONMENTS = ROOT / ".venv-hosts"
HOSTS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "hosts.toml").read_text(encoding="utf-8"))
SHOWN = ("torch", "transformers", "accelerate")
MARKERS = ("<!-- rows of tests/hosts -->\n", "<!-- end -->")
SECONDS = 1200
"""How long a script may take."""


def main(names: list[str]) -> int:
    """Try the hosts; return how many failed."""
    if unknown := [name for name in names if name not in HOSTS]:
        raise SystemExit(f"tests.hosts: no host {unknown[0]!r} in hosts.toml; there are {', '.join(HOSTS)}")
    wheel = built_wheel()
    failed = []
    for name in names or HOSTS:
        host = HOSTS[name]
        try:
            write_row(name, tried(name, host, wheel))
            print(f"{name}: passed", flush=True)
        except (AssertionError, subprocess.SubprocessError) as error:
            failed.append(name)
            print(f"{name}: FAILED\n{error}", flush=True)
    return len(failed)


def built_wheel() -> str:
    """Build a wheel of this package; return its path."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    command(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(ENVIRONMENTS), str(ROOT))
    return str(next(ENVIRONMENTS.glob("hf_lowprec-*.whl")))


def tried(name: str, host: dict[str, Any], wheel: str) -> str:
    """Install and run a host; return its row of the table."""
    python = environment(name, host)
    before = versions(python)
    extra = f"[{host['extra']}]" if "extra" in host else ""
    pip(python, "install", wheel + extra)
    after = versions(python)
    changed = {package: (v, after.get(package)) for package, v in before.items() if after.get(package) != v}
    assert not changed, f"installing hf-lowprec{extra} changed {changed}"
    with tempfile.TemporaryDirectory() as folder:
        variables = {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        variables |= {"DO_NOT_TRACK": "1", "TRITON_INTERPRET": "1"}  # some hosts report, some have kernels of their own
        # -I keeps this folder off sys.path, where trl.py would hide TRL.
        command(python, "-I", str(HERE / f"{host.get('script', name)}.py"), cwd=folder, **variables)
    package = next(iter(host.get("without_deps", host["install"]))).partition("=")[0].partition("[")[0]
    shown = (host.get("version") or after[_normal(package)], *(after.get(one, "–").partition("+")[0] for one in SHOWN))
    return f"| {' | '.join((f'[{name}](#{name})', *shown, host['run']))} |"


def environment(name: str, host: dict[str, Any]) -> str:
    """The interpreter of the host's environment, which is made anew if what to install has changed."""
    folder = ENVIRONMENTS / name
    python, stamp = str(folder / "bin" / "python"), folder / "installed.json"
    wanted = json.dumps({key: host.get(key) for key in ("install", "without_deps", "remove", "python")})
    if not stamp.is_file() or stamp.read_text() != wanted:
        base = shutil.which(f"python{host['python']}") if "python" in host else sys.executable
        assert base, f"needs Python {host['python']}"
        command(base, "-m", "venv", "--clear", str(folder))
        pip(python, "install", *host["install"])
        if "without_deps" in host:
            pip(python, "install", "--no-deps", *host["without_deps"])
        if "remove" in host:
            pip(python, "uninstall", "--yes", *host["remove"])
        stamp.write_text(wanted)
    # Makes importable what the scripts share, and `tests`; after the environment's own packages.
    shared = next(folder.glob("lib/python*/site-packages")) / "shared_with_tests.pth"
    shared.write_text(f"{HERE / 'shared'}\n{ROOT / 'tests' / 'support' / 'training'}\n{ROOT}\n")
    pip(python, "uninstall", "--yes", "hf-lowprec")
    return python


def versions(python: str) -> dict[str, str]:
    """The version of each package in an environment, this one aside."""
    listed = json.loads(command(python, "-m", "pip", "list", "--format=json"))
    return {_normal(one["name"]): one["version"] for one in listed if one["name"] != "hf-lowprec"}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def pip(python: str, *arguments: str) -> None:
    command(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def command(*words: str, cwd: str | None = None, **variables: str) -> str:
    """Run a command with more environment variables; return what it printed, or raise AssertionError with its end."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=cwd, env=env)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def write_row(name: str, row: str) -> None:
    """Put a host's row into the page's table, in the order of hosts.toml."""
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(MARKERS[0]) + len(MARKERS[0]), text.index(MARKERS[1])
    head, rule, *rows = text[start:end].strip().splitlines()
    by_name = {line.partition("]")[0].removeprefix("| ["): line for line in rows} | {name: row}
    table = "\n".join([head, rule, *(by_name[host] for host in HOSTS if host in by_name)])
    PAGE.write_text(f"{text[:start]}{table}\n{text[end:]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
