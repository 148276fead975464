"""A path, as programs that use the library have it."""

import os

StrPath = str | os.PathLike[str]
