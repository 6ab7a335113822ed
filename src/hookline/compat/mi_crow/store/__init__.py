"""Where runs are kept."""

from hookline.compat.mi_crow.store.local_store import LocalStore as LocalStore
