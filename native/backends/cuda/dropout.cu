// dropout(x, seed) -> y: zero where the element's random word is below p * 2^32, else x / (1 - p). The words are
// those of Philox4x32-10 (surogate_core/ops/dropout.py): element e takes word e % 4 of counter (e / 4, stream_id),
// key seed. The seed is read from device memory, so that a captured graph draws new words at every step.
//
// Floor: x and y once. Ten rounds of two wide products for four elements come to some 1.5 times the rate of memory in
// bf16, so that the arithmetic hides behind the loads, of which a thread has two (bf16) or four (f32) packs in
// flight.
#include "philox.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;
constexpr int kTile = kThreads * kPerThread;

struct Choice {
  uint32_t threshold;  // words below it drop
  uint32_t stream_id;
  float scale;
};

template <int N, bool packed, class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T *x, const uint32_t *seed, T *y, int64_t count, Choice choice) {
  constexpr int kPacks = kPerThread / N;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTile, first = tile + threadIdx.x * N;
  const uint32_t key0 = seed[0], key1 = seed[1];
  with_whole(packed && tile + kTile <= count, [&](auto whole) {
    float values[kPacks][N];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int64_t i = first + j * kThreads * N;
      load_upto<N, packed>(x + i, whole ? N : count - i, values[j]);
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int64_t i = first + j * kThreads * N;
#pragma unroll
      for (int k = 0; k < N; k += 4) {
        const uint64_t counter = static_cast<uint64_t>(i + k) / 4;
        uint32_t words[4];
        philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), choice.stream_id, 0}, key0, key1,
               words);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          values[j][k + m] = words[m] >= choice.threshold ? values[j][k + m] * choice.scale : 0.0f;
        }
      }
      store_upto<N, packed>(y + i, whole ? N : count - i, values[j]);
    }
  });
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *seed = input(call, 1), *y = output(call, 0);
  if (!x || !seed || !y || !all_dense(call) || !is_activation(x) || x->dtype != y->dtype || !same_shape(x, y)) return 0;
  if (seed->dtype != SG_I32 || num_elements(seed) != 2) return 0;
  const double p = attr_float(call, "p", 0.0);
  return p >= 0.0 && p < 1.0 ? 10 : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0);
  const double p = attr_float(call, "p", 0.0);
  const Choice choice{static_cast<uint32_t>(p * 4294967296.0), static_cast<uint32_t>(attr_int(call, "stream_id", 0)),
                      static_cast<float>(1.0 / (1.0 - p))};
  const int64_t count = num_elements(x);
  if (count == 0) return SG_OK;
  with_type(x, [&]<class T>(T) {
    constexpr int N = pack_of<T>();
    const T *from = data<const T>(x);
    T *to = data<T>(output(call, 0));
    const uint32_t *seed = data<const uint32_t>(input(call, 1));
    const auto blocks = static_cast<unsigned>(ceil_div(count, kTile));
    if (is_aligned<N>(from) && is_aligned<N>(to)) {
      dropout_kernel<N, true><<<blocks, kThreads, 0, stream(call)>>>(from, seed, to, count, choice);
    } else {
      dropout_kernel<N, false><<<blocks, kThreads, 0, stream(call)>>>(from, seed, to, count, choice);
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("dropout", "cuda", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
