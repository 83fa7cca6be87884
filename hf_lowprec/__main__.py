"""`python -m hf_lowprec` is the command line."""

from hf_lowprec.tools.cli import main

if __name__ == "__main__":
    main()
