"""Files, below the engine: written whole or not at all, and tensors with a checksum."""
