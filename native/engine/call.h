// A kernel together with the call it was chosen for.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "registry.h"
#include "surogate/abi.h"

namespace surogate {

constexpr size_t kErrorSize = 1024;  // bytes of the buffer in which a kernel says what went wrong

sg_call make_call(const char *op, sg_stream *stream, std::span<const sg_tensor *const> inputs,
                  std::span<const sg_tensor *const> outputs, std::span<const sg_attr> attrs, char *error);

// One line an operand of a call: "input 0: bf16[4, 576]".
std::vector<std::string> describe_operands(const sg_call &call);

// Throws what a kernel wrote into call.error.
[[noreturn]] void throw_kernel_error(const Kernel &kernel, const sg_call &call, const char *phase);

// Owns the state that a kernel prepared. Refers to the call, which must outlive it.
class BoundKernel {
 public:
  BoundKernel(const Kernel *kernel, sg_call &call);
  ~BoundKernel();
  BoundKernel(BoundKernel &&other) noexcept;
  BoundKernel &operator=(BoundKernel &&) = delete;

  const Kernel &kernel() const { return *kernel_; }
  size_t workspace_bytes() const { return workspace_bytes_; }
  void prepare();
  void run();

 private:
  const Kernel *kernel_;
  sg_call *call_;
  size_t workspace_bytes_ = 0;
};

}  // namespace surogate
