"""Started by `bulkhead doctor` with any venv's interpreter, whether Bulkhead is
installed there or not."""

import os
import sys

_HERE = os.path.dirname(os.path.realpath(__file__))

if __name__ == "__main__":
    # This folder's modules are the package's. The package goes last, so that it hides
    # nothing of the venv.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _HERE]
    sys.path.append(os.path.dirname(os.path.dirname(_HERE)))
    from bulkhead.doctor.__main__ import main

    sys.exit(main())
