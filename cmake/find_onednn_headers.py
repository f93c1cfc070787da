"""Print the folder of oneDNN's headers, as the distribution onednn-devel-cpu-gomp installed them.

Asked of the distribution, not of sys.prefix: in an isolated build the two differ.
"""

from importlib.metadata import PackageNotFoundError, files

try:
    headers = [f.locate() for f in files("onednn-devel-cpu-gomp") or () if f.name == "dnnl.h"]
except PackageNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed") from None
# The top-level dnnl.h forwards to oneapi/dnnl/dnnl.h; the shorter path is the one to include from.
headers = sorted((h.resolve() for h in headers if h.exists()), key=lambda h: len(h.parts))
if not headers:
    raise SystemExit("onednn-devel-cpu-gomp is installed, but without its headers")
print(headers[0].parent)
