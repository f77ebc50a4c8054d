"""`python examine_on_gpu.py FILE NAME`: one case of the corpus, by the fake run and by a real capture, as JSON. A process of its own:
a capture that fails can spoil CUDA for the whole process."""

import json
import sys
from pathlib import Path

from bulkhead.doctor import diagnose
from findings import cases

case = next(case for case in cases(Path(sys.argv[1])) if case.name == sys.argv[2])
print(json.dumps(diagnose(case.target, case.factory, gpu=True).document()))
