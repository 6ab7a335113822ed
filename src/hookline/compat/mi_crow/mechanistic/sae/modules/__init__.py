"""The kinds of autoencoders."""

from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSae as TopKSae
from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSaeTrainingConfig as TopKSaeTrainingConfig
