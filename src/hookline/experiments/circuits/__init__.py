"""Circuits: the edges or nodes with the largest scores, and how much of the model's behavior they account for."""

from hookline.experiments.circuits.circuit_edges import Circuit
from hookline.experiments.circuits.circuit_faithfulness import circuit, faithfulness
from hookline.experiments.circuits.circuit_files import load_circuit as load
from hookline.experiments.circuits.circuit_files import save_circuit as save

__all__ = ["Circuit", "circuit", "faithfulness", "load", "save"]


def __dir__() -> list[str]:
    return __all__
