// The kernel of paged_attention that takes every call, for those that take most.
#pragma once

#include "surogate/abi.h"

namespace sg::cuda {

int32_t run_paged_attention(const sg_call *call);

}  // namespace sg::cuda
