"""Functions as people write them: the parameters of a forward, how a hook is called, which keywords a model uses."""
