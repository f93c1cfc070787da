// The element types of the kernel ABI.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

// nullptr for a code or a name that is not known.
SUROGATE_API const sg_dtype_info *dtype_info(int32_t dtype);
SUROGATE_API int32_t dtype_from_name(std::string_view name);  // throws Error, naming the known types
SUROGATE_API std::string dtype_name(int32_t dtype);           // "dtype 99" for an unknown code

inline bool is_block_dtype(int32_t dtype) { return dtype >= 64; }

}  // namespace surogate
