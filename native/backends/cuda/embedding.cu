// embedding(tokens[T], weight[V, D]) -> y[T, D] = scale * weight[tokens], from a table in any weight dtype, read in
// place. A token outside the table gives a row of NaN.
//
// Floor: a row of the table and one of y for each token. A warp makes one segment of one row, so that all of its
// loads are in flight at once: four packs a lane, or 16 elements a lane of a quantised table.
#include "dequantize.h"
#include "quant.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kPacks = 4;
constexpr int kQuantisedSegment = 32 * 16;

struct Shape {
  int64_t tokens, vocabulary, width;
  int64_t segments;  // of a row
};

template <int N, bool packed, class W, class Y>
__global__ void __launch_bounds__(kWarpTaskThreads)
    plain_kernel(Shape shape, const int32_t *tokens, const W *weight, float scale, Y *y) {
  wait_for_kernels_ahead();
  const int64_t task = warp_task(), token = task / shape.segments;
  if (token >= shape.tokens) return;
  const int64_t first = task % shape.segments * (32 * N * kPacks) + lane_index() * N;
  const int64_t id = tokens[token];
  const bool known = id >= 0 && id < shape.vocabulary;
  const W *from = weight + (known ? id : 0) * shape.width;
  Y *to = y + token * shape.width;
  float values[kPacks][N];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = first + 32 * N * j;
    load_within<N, packed>(from + column, shape.width - column, values[j]);
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = first + 32 * N * j;
#pragma unroll
    for (int k = 0; k < N; ++k) values[j][k] = known ? values[j][k] * scale : not_a_number();
    store_within<N, packed>(to + column, shape.width - column, values[j]);
  }
}

template <int32_t dtype, bool fast, class Y>
__global__ void __launch_bounds__(kWarpTaskThreads)
    quantised_kernel(Shape shape, const int32_t *tokens, const uint8_t *weight, float scale, Y *y) {
  wait_for_kernels_ahead();
  using Format = Decoder<dtype>;
  constexpr int kParts = Format::kElements / 16;
  const int64_t task = warp_task(), token = task / shape.segments;
  if (token >= shape.tokens) return;
  const int64_t part = task % shape.segments * 32 + lane_index();
  if (part * 16 >= shape.width) return;
  const int64_t id = tokens[token], block = part / kParts;
  const bool known = id >= 0 && id < shape.vocabulary;
  const int64_t row_bytes = shape.width / Format::kElements * Format::kBytes;
  Y *to = y + token * shape.width + block * Format::kElements;
  Format::template decode<fast>(weight + (known ? id : 0) * row_bytes + block * Format::kBytes,
                                static_cast<int>(part % kParts), [&](int offset, float(&values)[8]) {
#pragma unroll
                                  for (int k = 0; k < 8; ++k) values[k] = known ? values[k] * scale : not_a_number();
                                  store_upto<8, fast>(to + offset, 8, values);
                                });
}

template <class W, class Y>
void launch_plain(const sg_call *call, Shape shape, const int32_t *tokens, const W *weight, float scale, Y *y) {
  constexpr int N = pack_of<W, Y>();
  shape.segments = ceil_div(shape.width, 32 * N * kPacks);
  const unsigned blocks = warp_task_blocks(shape.tokens * shape.segments);
  const bool packed = can_pack<N>(weight, shape.width) && can_pack<N>(y, shape.width);
  const auto kernel = packed ? plain_kernel<N, true, W, Y> : plain_kernel<N, false, W, Y>;
  launch_ahead(call, blocks, kWarpTaskThreads, 0, kernel, shape, tokens, weight, scale, y);
}

template <int32_t dtype, class Y>
void launch_quantised(const sg_call *call, Shape shape, const int32_t *tokens, const uint8_t *weight, float scale,
                      Y *y) {
  shape.segments = ceil_div(shape.width, kQuantisedSegment);
  const unsigned blocks = warp_task_blocks(shape.tokens * shape.segments);
  const int64_t row_bytes = shape.width / Decoder<dtype>::kElements * Decoder<dtype>::kBytes;
  const bool aligned = (reinterpret_cast<uintptr_t>(weight) | row_bytes) % Decoder<dtype>::kAlignment == 0;
  const bool fast = aligned && can_pack<8>(y, shape.width);
  const auto kernel = fast ? quantised_kernel<dtype, true, Y> : quantised_kernel<dtype, false, Y>;
  launch_ahead(call, blocks, kWarpTaskThreads, 0, kernel, shape, tokens, weight, scale, y);
}

bool is_table(int32_t dtype) {
  return dtype == SG_F32 || dtype == SG_BF16 || dtype == SG_F16 || is_quantised(dtype);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *weight = input(call, 1), *y = output(call, 0);
  if (!tokens || !weight || !y || tokens->dtype != SG_I32 || tokens->rank != 1 || !all_dense(call)) return 0;
  if (weight->rank != 2 || y->rank != 2 || !is_table(weight->dtype) || !is_activation(y)) return 0;
  return y->shape[0] == tokens->shape[0] && y->shape[1] == weight->shape[1] && weight->shape[0] > 0 ? 10 : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *weight = input(call, 1), *y = output(call, 0);
  const Shape shape{tokens->shape[0], weight->shape[0], weight->shape[1], 0};
  const float scale = static_cast<float>(attr_float(call, "scale", 1.0));
  const int32_t *ids = data<const int32_t>(tokens);
  if (num_elements(y) == 0) return SG_OK;
  with_type(y, [&]<class Y>(Y) {
    Y *to = data<Y>(y);
    const bool quantised = with_format(weight->dtype, [&](auto format) {
      launch_quantised<decltype(format)::value>(call, shape, ids, data<const uint8_t>(weight), scale, to);
    });
    if (quantised) return;
    if (weight->dtype == SG_F16) {
      launch_plain(call, shape, ids, data<const f16>(weight), scale, to);
    } else {
      with_type(weight, [&]<class W>(W) { launch_plain(call, shape, ids, data<const W>(weight), scale, to); });
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("embedding", "cuda", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
