"""Print the folder of a header that an NVIDIA wheel brought: find_cuda_headers.py cublasLt.h

Asked of the distributions, not of sys.prefix: in an isolated build the two differ.
"""

import sys
from importlib.metadata import PackageNotFoundError, files

WHERE = {"cublasLt.h": "nvidia-cublas", "cudnn.h": "nvidia-cudnn-cu13", "cudnn_frontend.h": "nvidia-cudnn-frontend"}

header = sys.argv[1]
try:
    found = [f.locate() for f in files(WHERE[header]) or () if f.name == header]
except PackageNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed") from None
found = [f for f in found if f.exists()]
if not found:
    raise SystemExit(f"{WHERE[header]} is installed, but without {header}")
print(found[0].resolve().parent)
