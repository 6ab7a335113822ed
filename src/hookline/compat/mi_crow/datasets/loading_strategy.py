"""Where the rows of a data set are while it is in use."""

from enum import StrEnum


class LoadingStrategy(StrEnum):
    """MEMORY and DISK are the same here: `datasets` maps its files into memory. STREAMING reads rows as they come."""

    MEMORY = "memory"
    DISK = "disk"
    STREAMING = "streaming"
