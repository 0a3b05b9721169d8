"""Where Hydra finds groups and options: in the script's own folder, then in ours, then in the user's.

A script that uses `hydra.main` itself names ours in its primary config::

    hydra:
      searchpath: [pkg://lightning_pfo.conf]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.paths import conf_dirs

_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")


class PackagedGroups(SearchPathPlugin):
    """Puts our groups, and those of the user's folder, behind those of the script."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders."""
        present = {entry.path for entry in search_path.get_path()}
        for folder in conf_dirs():
            if str(folder) not in present:  # as the primary folder of a script that has none of its own
                search_path.append(provider="lightning_pfo", path=f"file://{folder}")


def find_packaged_groups() -> None:
    """Let every composition of this process find them."""
    Plugins.instance().register(PackagedGroups)


def searched_folders(arguments: Sequence[str], own: Path | None) -> list[Path]:
    """Folders whose groups Hydra finds: the script's `own`, ours, the user's, and those that flags add.

    Raises:
        ConfigurationError: If a flag adds one that is not there.
    """
    added = []
    for text, after in pairwise([*arguments, ""]):
        flag, equals, value = text.partition("=")
        if flag in _FLAGS:
            added.append((flag, value if equals else after))
    for flag, value in added:
        if not Path(value).is_dir() and not value.startswith("pkg://"):
            raise ConfigurationError(f"{flag} is a folder of groups; there is none at {value}. Give {flag}=FOLDER.")
    return [*([own] if own else []), *conf_dirs(), *(Path(value) for _, value in added)]
