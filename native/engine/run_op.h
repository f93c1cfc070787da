// One op on operands in the host's memory, outside of any program: for tests, tools and plugin authors.
#pragma once

#include <span>
#include <string>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

// `attrs` need not be sorted. An operand with data == NULL is absent. On a device the op runs on copies between guard
// bytes, and outputs are copied back; an output over an input's memory stays so. Throws Error, also for a kernel that wrote
// beside its outputs or changed an input.
SUROGATE_API void run_op(const std::string &op, std::span<const sg_tensor> inputs, std::span<const sg_tensor> outputs,
                         std::span<const sg_attr> attrs, const std::string &backend, const std::string &kernel,
                         int32_t threads);

}  // namespace surogate
