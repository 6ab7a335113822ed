def read(*a, **k): raise NotImplementedError
def write(*a, **k): raise NotImplementedError
