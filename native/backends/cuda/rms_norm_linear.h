// rms_norm_linear by the kernel that takes every call with a bf16 weight: for those that cannot take operands which begin
// anywhere.
#pragma once

#include "surogate/abi.h"

namespace sg::cuda {

int32_t run_rms_norm_linear(const sg_call *call);

}  // namespace sg::cuda
