// Memory, streams, events and graphs of CUDA devices, as the engine uses them.
#pragma once

#include "surogate/abi.h"

namespace sg::cuda {

const sg_backend &backend();

}  // namespace sg::cuda
