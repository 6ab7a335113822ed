"""The base class of data sets, under mi-crow's path: there is one class here."""

from hookline.compat.mi_crow.datasets.text_dataset import TextDataset as BaseDataset

__all__ = ["BaseDataset"]
