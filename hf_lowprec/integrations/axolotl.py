"""A plugin of axolotl: `plugins: [hf_lowprec.integrations.axolotl.Plugin]`."""

from axolotl.integrations.base import BasePlugin


class Plugin(BasePlugin):
    """Registers our names for `optimizer:` on import, which axolotl does in every process that reads the YAML file."""
