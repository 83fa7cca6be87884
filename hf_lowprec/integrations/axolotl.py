"""A plugin of axolotl: `plugins: [hf_lowprec.integrations.axolotl.Plugin]`."""

from axolotl.integrations.base import BasePlugin


class Plugin(BasePlugin):
    """Importing it registers our names for `optimizer:`. axolotl does so in every process that reads the YAML file."""
