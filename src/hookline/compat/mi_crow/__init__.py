"""mi-crow's interface over hookline: change `mi_crow` to `hookline.compat.mi_crow`.

    from hookline.compat.mi_crow.hooks import LayerActivationDetector
    from hookline.compat.mi_crow.language_model import LanguageModel

What differs, and what is not here, is in docs/from-mi-crow.md.
"""

from hookline.compat.mi_crow import hooks, language_model, store

__all__ = ["hooks", "language_model", "store"]
