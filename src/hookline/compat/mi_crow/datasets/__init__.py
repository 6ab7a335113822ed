"""Data sets of texts, under mi-crow's path."""

from hookline.compat.mi_crow.datasets.loading_strategy import LoadingStrategy as LoadingStrategy
from hookline.compat.mi_crow.datasets.text_dataset import TextDataset as TextDataset
