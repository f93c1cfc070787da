// Sizes and printed forms of tensors.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

// Bytes from the first to past the last element, counted from `data`; strides are in elements and not negative.
// Throws Error for an unknown dtype, a rank or size out of range, a block type whose last axis is not dense or not
// whole blocks.
SUROGATE_API int64_t extent_bytes(const sg_tensor &tensor);

// A dense row-major tensor; throws as extent_bytes does.
SUROGATE_API sg_tensor dense_tensor(void *data, int32_t dtype, std::span<const int64_t> shape);

SUROGATE_API std::string shape_text(const sg_tensor &tensor);                           // "[4, 576]"
SUROGATE_API std::string operand_text(const std::string &name, const sg_tensor &tensor);  // "x: bf16[4, 576]"

}  // namespace surogate
