#include "tile_map.h"

namespace sg::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Nothing here links to the driver, which need not be there.
Encode encoder() {
  static const Encode found = [] {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

int64_t element_bytes(const sg_tensor *t) { return t->dtype == SG_F32 ? 4 : 2; }
int64_t row_bytes(const sg_tensor *t) {
  return element_bytes(t) * (t->shape[0] <= 1 ? t->shape[1] : t->strides[0]);
}

}  // namespace

bool can_map_tiles(const sg_tensor *matrix) {
  return matrix->rank == 2 && is_activation(matrix) && has_dense_rows(matrix) && matrix->shape[0] > 0 &&
         matrix->shape[1] > 0 && matrix->shape[0] < INT32_MAX && matrix->shape[1] < INT32_MAX &&
         row_bytes(matrix) % 16 == 0 && encoder() != nullptr;
}

bool map_tiles(const sg_tensor *matrix, int rows, CUtensorMap *map, int tile_row_bytes) {
  const Encode encode = encoder();
  if (encode == nullptr) return false;
  const auto type = matrix->dtype == SG_F32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix->shape[1]), static_cast<cuuint64_t>(matrix->shape[0])};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes(matrix))};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(tile_row_bytes / element_bytes(matrix)), static_cast<cuuint32_t>(rows)};
  const cuuint32_t steps[2] = {1, 1};
  const auto swizzle = tile_row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : tile_row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                              : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode(map, type, 2, matrix->data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool map_heads(const sg_tensor *heads, int parts, int rows, CUtensorMap *map) {
  const Encode encode = encoder();
  if (encode == nullptr) return false;
  const auto width = static_cast<cuuint64_t>(heads->shape[1] * heads->shape[2]);
  const int64_t stride = heads->shape[0] <= 1 ? heads->shape[1] * heads->shape[2] : heads->strides[0];
  const cuuint64_t sizes[3] = {64, width / 64, static_cast<cuuint64_t>(heads->shape[0])};
  const cuuint64_t strides[2] = {128, 2 * static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(parts), static_cast<cuuint32_t>(rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, heads->data, sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace sg::cuda
