"""mi-crow's interface over hookline: change `mi_crow` to `hookline.compat.mi_crow`.

    from hookline.compat.mi_crow.hooks import LayerActivationDetector
    from hookline.compat.mi_crow.language_model import LanguageModel

docs/from-mi-crow.md lists what differs and what is not available.
"""

from hookline.compat.mi_crow import hooks as hooks
from hookline.compat.mi_crow import language_model as language_model
from hookline.compat.mi_crow import store as store
