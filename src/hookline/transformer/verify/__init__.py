"""The verifier: checks each point of a model against what the model itself reports."""
