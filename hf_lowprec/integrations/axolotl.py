"""A plugin of axolotl: `plugins: [hf_lowprec.integrations.axolotl.Plugin]`."""

from axolotl.integrations.base import BasePlugin


class Plugin(BasePlugin):
    """Has this package imported, which registers its names for `optimizer:`, in every process that reads the file."""
