"""Move scripts and notebooks from other libraries to `hookline.compat`: `hookline migrate PATH…`.

from hookline.migrate import migrate

for file in migrate(["notebooks/"]):      # changes nothing; write=True does
    print(file)
"""

from hookline.migrate.file_changes import BehaviorChange, FileLine, FileReport, ImportChange, migrate, summary

__all__ = ["migrate", "summary", "FileReport", "ImportChange", "BehaviorChange", "FileLine"]
