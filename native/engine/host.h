// What the engine offers to kernels, as one constant table.
#pragma once

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

SUROGATE_API const sg_host *host_table();

}  // namespace surogate
