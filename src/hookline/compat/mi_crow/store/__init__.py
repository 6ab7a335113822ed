"""The store of runs, under mi-crow's path."""

from hookline.compat.mi_crow.store.local_store import LocalStore as LocalStore
