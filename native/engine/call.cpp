#include "call.h"

#include "host.h"
#include "tensor.h"

namespace surogate {

sg_call make_call(const char *op, sg_stream *stream, std::span<const sg_tensor *const> inputs,
                  std::span<const sg_tensor *const> outputs, std::span<const sg_attr> attrs, char *error) {
  sg_call call{};
  call.struct_size = sizeof(call);
  call.host = host_table();
  call.stream = stream;
  call.op = op;
  call.num_inputs = static_cast<int32_t>(inputs.size());
  call.num_outputs = static_cast<int32_t>(outputs.size());
  call.num_attrs = static_cast<int32_t>(attrs.size());
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  call.attrs = attrs.data();
  call.error = error;
  call.error_size = kErrorSize;
  return call;
}

std::vector<std::string> describe_operands(const sg_call &call) {
  std::vector<std::string> lines;
  auto describe = [&](const char *side, int32_t count, const sg_tensor *const *operands) {
    for (int32_t i = 0; i < count; ++i) {
      const std::string name = side + std::to_string(i);
      lines.push_back(operands[i]->data == nullptr ? name + ": absent" : operand_text(name, *operands[i]));
    }
  };
  describe("input ", call.num_inputs, call.inputs);
  describe("output ", call.num_outputs, call.outputs);
  return lines;
}

void throw_kernel_error(const Kernel &kernel, const sg_call &call, const char *phase) {
  call.error[call.error_size - 1] = '\0';
  const std::string reason = call.error[0] != '\0' ? call.error : "the kernel gave no reason";
  Error error("op '" + std::string(call.op) + "', kernel '" + kernel.table.name + "' failed to " + phase + ": " +
              reason);
  error.op = call.op;
  error.operands = describe_operands(call);
  throw error;
}

BoundKernel::BoundKernel(const Kernel *kernel, sg_call &call) : kernel_(kernel), call_(&call) {
  if (kernel->table.workspace != nullptr) workspace_bytes_ = kernel->table.workspace(&call);
}

BoundKernel::BoundKernel(BoundKernel &&other) noexcept
    : kernel_(other.kernel_), call_(other.call_), workspace_bytes_(other.workspace_bytes_) {
  other.call_ = nullptr;
}

BoundKernel::~BoundKernel() {
  if (call_ != nullptr && call_->state != nullptr && kernel_->table.release != nullptr) {
    kernel_->table.release(call_->state);
    call_->state = nullptr;
  }
}

void BoundKernel::prepare() {
  if (kernel_->table.prepare == nullptr) return;
  if (kernel_->table.prepare(call_, &call_->state) != SG_OK) throw_kernel_error(*kernel_, *call_, "prepare");
}

void BoundKernel::run() {
  if (kernel_->table.run(call_) != SG_OK) throw_kernel_error(*kernel_, *call_, "run");
}

}  // namespace surogate
