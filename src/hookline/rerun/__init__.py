"""Running a model again in part: from a run whose streams, keys and values were kept."""
