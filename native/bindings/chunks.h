// class ChunkWriter: streamed answers on their way into sockets.
#pragma once

#include <nanobind/nanobind.h>

namespace surogate::python {

void bind_chunks(nanobind::module_ &m);

}  // namespace surogate::python
