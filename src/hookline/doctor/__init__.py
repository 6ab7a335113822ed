"""`hookline doctor`: versions, devices, whether each device computes what the CPU does, and what is proved on a model.

from hookline.doctor import diagnose

print(diagnose(hookline.load("gpt2")))
"""

from hookline.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["diagnose", "Diagnosis"]
