"""Experiments: free functions of a model, prompts and a metric, each giving a labelled `Result`."""
