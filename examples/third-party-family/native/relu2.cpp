// Squared ReLU and its gradient for the CPU backend, against the C ABI of Surogate and nothing else of it.
//
//   relu2(x) -> y             y  = max(x, 0)^2            x, y   [...]  f32 or bf16, one dtype
//   relu2_grad(dy, x) -> dx   dx = dy * 2 * max(x, 0)     dy, x, dx     likewise
//
// Both are bound by memory: one pass, split among the workers in chunks of a fixed size, so that the result does not
// depend on how many workers there are.
#include <pybind11/pybind11.h>
#include <surogate/abi.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t kChunk = 16384;  // elements of one task

int64_t size_of(const sg_tensor &t) {
  int64_t n = 1;
  for (int32_t i = 0; i < t.rank; ++i) n *= t.shape[i];
  return n;
}

bool dense(const sg_tensor &t) {
  int64_t expected = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

float load(const void *data, int64_t i, float *) { return static_cast<const float *>(data)[i]; }
void store(void *data, int64_t i, float value, float *) { static_cast<float *>(data)[i] = value; }

// bf16 is the upper half of a float; rounded to nearest, ties to even. A NaN stays a NaN.
float load(const void *data, int64_t i, uint16_t *) {
  uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t *>(data)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
void store(void *data, int64_t i, float value, uint16_t *) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = value != value ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  static_cast<uint16_t *>(data)[i] = static_cast<uint16_t>(rounded);
}

// A comparison that a NaN passes through, as in the reference.
float relu(float x) { return x < 0.0f ? 0.0f : x; }

template <class T>
void forward(void *context, int64_t task, int32_t) {
  const auto *call = static_cast<const sg_call *>(context);
  const sg_tensor *x = call->inputs[0], *y = call->outputs[0];
  T *type = nullptr;
  const int64_t end = std::min(size_of(*x), (task + 1) * kChunk);
  for (int64_t i = task * kChunk; i < end; ++i) {
    const float positive = relu(load(x->data, i, type));
    store(y->data, i, positive * positive, type);
  }
}

template <class T>
void backward(void *context, int64_t task, int32_t) {
  const auto *call = static_cast<const sg_call *>(context);
  const sg_tensor *dy = call->inputs[0], *x = call->inputs[1], *dx = call->outputs[0];
  T *type = nullptr;
  const int64_t end = std::min(size_of(*x), (task + 1) * kChunk);
  for (int64_t i = task * kChunk; i < end; ++i) {
    store(dx->data, i, load(dy->data, i, type) * 2.0f * relu(load(x->data, i, type)), type);
  }
}

// Every operand dense, of one shape and one dtype that this library knows.
int32_t supports(const sg_call *call) {
  const sg_tensor &y = *call->outputs[0];
  if ((y.dtype != SG_F32 && y.dtype != SG_BF16) || !dense(y)) return 0;
  for (int32_t i = 0; i < call->num_inputs; ++i) {
    const sg_tensor &x = *call->inputs[i];
    if (x.dtype != y.dtype || x.rank != y.rank || !dense(x)) return 0;
    if (!std::equal(x.shape, x.shape + x.rank, y.shape)) return 0;
  }
  return 10;
}

int32_t run(const sg_call *call, sg_task_fn f32, sg_task_fn bf16) {
  const sg_tensor &y = *call->outputs[0];
  const int64_t tasks = (size_of(y) + kChunk - 1) / kChunk;
  call->host->parallel_for(call->stream, tasks, y.dtype == SG_F32 ? f32 : bf16, const_cast<sg_call *>(call));
  return SG_OK;
}

int32_t run_forward(const sg_call *call) { return run(call, forward<float>, forward<uint16_t>); }
int32_t run_backward(const sg_call *call) { return run(call, backward<float>, backward<uint16_t>); }

sg_kernel describe(const char *op, int32_t in_place_input, int32_t (*run_kernel)(const sg_call *)) {
  sg_kernel kernel{};
  kernel.struct_size = sizeof kernel;
  kernel.op = op;
  kernel.backend = "cpu";
  kernel.name = "tidy";
  kernel.traits = SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE;
  kernel.in_place_input = in_place_input;
  kernel.supports = supports;
  kernel.run = run_kernel;
  return kernel;
}

const sg_kernel kForward = describe("relu2", 0, run_forward);
const sg_kernel kBackward = describe("relu2_grad", 0, run_backward);
const sg_kernel *const kKernels[] = {&kForward, &kBackward};
const sg_kernel_library kLibrary = {
    sizeof(sg_kernel_library), SG_ABI_MAJOR, SG_ABI_MINOR, "surogate_tidy", "0.1.0", 2, kKernels,
};

}  // namespace

PYBIND11_MODULE(_kernels, module) {
  module.doc() = "Kernels of surogate-tidy.";
  module.def(
      "kernel_library", [] { return pybind11::capsule(&kLibrary, "surogate.kernel_library_v1"); },
      "The kernels as the engine takes them: a capsule around an sg_kernel_library.");
}
