#include "run_op.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"
#include "device.h"
#include "dtype.h"
#include "host.h"
#include "memory.h"
#include "registry.h"
#include "tensor.h"
#include "thread_pool.h"

namespace surogate {
namespace {

// Pools are kept: starting a thread costs more than most ops that are run this way. One op at a time uses them.
std::mutex run_mutex;

ThreadPool &shared_pool(int32_t threads) {
  static std::map<int32_t, std::unique_ptr<ThreadPool>> pools;
  std::unique_ptr<ThreadPool> &pool = pools[threads];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(threads);
  return *pool;
}

// Operands of the host, copied to a device. Each lies between guards, in memory whose every byte was set before.
class DeviceOperands {
 public:
  DeviceOperands(std::shared_ptr<Device> device, const Stream &stream, std::span<const sg_tensor> inputs,
                 std::span<const sg_tensor> outputs)
      : device_(std::move(device)), stream_(stream), inputs_(inputs), outputs_(outputs) {
    size_t total = kGuard;
    for (const sg_tensor &t : inputs_) total += place(t, total);
    for (const sg_tensor &t : outputs_) total += place(t, total);
    memory_ = Memory(device_, total, "operands of one op");
    image_.assign(total, kPattern);
    for (size_t i = 0; i < places_.size(); ++i) fill(i);
    device_->upload(memory_.data(), image_.data(), total, stream_);
  }

  std::span<const sg_tensor> inputs() const { return std::span(copies_).first(inputs_.size()); }
  std::span<const sg_tensor> outputs() const { return std::span(copies_).subspan(inputs_.size()); }

  // Copies the outputs back. Throws Error where anything else changed.
  void finish(const std::string &op) {
    std::vector<unsigned char> after(image_.size());
    device_->download(after.data(), memory_.data(), after.size(), stream_);
    for (size_t i = inputs_.size(); i < places_.size(); ++i) {
      const Place &p = places_[i];
      if (p.bytes == 0) continue;
      const sg_tensor &output = outputs_[i - inputs_.size()];
      for_each_run(output, 0, 0, [&](size_t at, size_t bytes) {
        std::memcpy(static_cast<char *>(output.data) + at, after.data() + p.offset + at, bytes);
        std::memcpy(image_.data() + p.offset + at, after.data() + p.offset + at, bytes);
      });
    }
    const auto [changed, other] = std::mismatch(after.begin(), after.end(), image_.begin());
    if (changed == after.end()) return;
    const size_t at = static_cast<size_t>(changed - after.begin());
    size_t nearest = 0;
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].bytes > 0 && places_[i].offset <= at + kGuard) nearest = i;
    }
    const bool is_input = nearest < inputs_.size();
    throw Error("op '" + op + "' wrote byte " + std::to_string(static_cast<int64_t>(at) -
                static_cast<int64_t>(places_[nearest].offset)) + " of " + (is_input ? "input " : "output ") +
                std::to_string(is_input ? nearest : nearest - inputs_.size()) + ", which has " +
                std::to_string(places_[nearest].bytes) + (is_input ? " bytes and is only read" : " bytes"));
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr unsigned char kPattern = 0xFF;
  struct Place {
    size_t offset = 0, bytes = 0;
  };

  // copy(at, bytes) for each stretch of a tensor's own elements: what lies between rows is somebody else's.
  template <class Copy>
  static void for_each_run(const sg_tensor &t, int32_t axis, size_t at, const Copy &copy) {
    const sg_dtype_info &info = *dtype_info(t.dtype);
    const auto bytes_of = [&](int64_t elements) { return static_cast<size_t>(elements / info.block_elems * info.block_bytes); };
    if (t.rank == 0) return copy(at, bytes_of(1));
    if (axis == t.rank - 1 && t.strides[axis] == 1) return copy(at, bytes_of(t.shape[axis]));
    for (int64_t i = 0; i < t.shape[axis]; ++i) {
      const size_t here = at + bytes_of(i * t.strides[axis]);
      axis == t.rank - 1 ? copy(here, bytes_of(1)) : for_each_run(t, axis + 1, here, copy);
    }
  }

  // Notes where an operand goes; returns what it takes there, the guard behind it included.
  size_t place(const sg_tensor &tensor, size_t at) {
    copies_.push_back(tensor);
    Place p;
    if (tensor.data == nullptr) {
      places_.push_back(p);
      return 0;
    }
    p.bytes = static_cast<size_t>(extent_bytes(tensor));
    for (size_t i = 0; i < inputs_.size() && copies_.size() > inputs_.size(); ++i) {
      if (p.bytes > 0 && inputs_[i].data == tensor.data) {  // in place
        places_.push_back(places_[i]);
        return 0;
      }
    }
    p.offset = at;
    places_.push_back(p);
    return (p.bytes + 255) / 256 * 256 + kGuard;
  }

  void fill(size_t i) {
    const sg_tensor &source = i < inputs_.size() ? inputs_[i] : outputs_[i - inputs_.size()];
    if (source.data == nullptr) return;
    const Place &p = places_[i];
    copies_[i].data = static_cast<char *>(memory_.data()) + p.offset;
    if (p.bytes > 0) std::memcpy(image_.data() + p.offset, source.data, p.bytes);
  }

  std::shared_ptr<Device> device_;
  const Stream &stream_;
  std::span<const sg_tensor> inputs_, outputs_;
  std::vector<sg_tensor> copies_;
  std::vector<Place> places_;
  std::vector<unsigned char> image_;  // of the device's memory, as it should be
  Memory memory_;
};

// Chooses, prepares and runs the kernel for operands that lie where the stream's kernels read them.
void run_call(const std::string &op, std::span<const sg_tensor> inputs, std::span<const sg_tensor> outputs,
              std::span<const sg_attr> attrs, std::shared_ptr<Device> device, const std::string &kernel,
              sg_stream &stream) {
  std::vector<const sg_tensor *> input_pointers, output_pointers;
  for (const sg_tensor &tensor : inputs) input_pointers.push_back(&tensor);
  for (const sg_tensor &tensor : outputs) output_pointers.push_back(&tensor);
  char message[kErrorSize] = "";
  sg_call call = make_call(op.c_str(), &stream, input_pointers, output_pointers, attrs, message);
  const Choice choice = Registry::global().select(call, device->backend(), kernel);
  BoundKernel bound(choice.kernel, call);
  Memory workspace(device, bound.workspace_bytes(), "workspace of op '" + op + "'");
  call.workspace = workspace.data();
  call.workspace_size = bound.workspace_bytes();
  bound.prepare();
  bound.run();
  if (!device->is_host()) device->synchronize(stream.native);
}

}  // namespace

void run_op(const std::string &op, std::span<const sg_tensor> inputs, std::span<const sg_tensor> outputs,
            std::span<const sg_attr> attrs, const std::string &backend, const std::string &kernel, int32_t threads) {
  std::vector<sg_attr> sorted(attrs.begin(), attrs.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const sg_attr &a, const sg_attr &b) { return std::strcmp(a.name, b.name) < 0; });
  std::shared_ptr<Device> device = Device::open(backend, 0);
  std::lock_guard lock(run_mutex);
  device->activate();
  if (device->is_host()) {
    sg_stream stream{&shared_pool(threads), nullptr};
    return run_call(op, inputs, outputs, sorted, device, kernel, stream);
  }
  const Stream queue(device);
  sg_stream stream{&shared_pool(1), queue.native()};
  DeviceOperands operands(device, queue, inputs, outputs);
  run_call(op, operands.inputs(), operands.outputs(), sorted, device, kernel, stream);
  operands.finish(op);
}

}  // namespace surogate
