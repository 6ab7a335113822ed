"""The language model, under mi-crow's path."""

from hookline.compat.mi_crow.language_model.language_model import LanguageModel as LanguageModel
