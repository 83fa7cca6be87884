"""The command line: `python -m hf_lowprec`, and the console script `hf-lowprec`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from hf_lowprec.tools.cli import main as run_command_line
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        from hf_lowprec.oldest_versions import install_command

        sys.exit(f"hf-lowprec: the command line needs {error.name}: {install_command(error.name)}")
    run_command_line()


if __name__ == "__main__":
    main()
