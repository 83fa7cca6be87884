"""`hf-lowprec doctor`: checks of this machine, and what rounding will do to the updates of a planned run."""
