"""The base class of autoencoders, under mi-crow's path: there is one class here."""

from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSae as Sae

__all__ = ["Sae"]
