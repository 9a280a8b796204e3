"""Prints the path of ms-swift's plugin, for its `--external_plugins`."""

from __future__ import annotations

import os

from ckptmgr.callbacks import ms_swift

print(os.path.abspath(ms_swift.__file__))
