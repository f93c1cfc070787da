#include "tensor.h"

#include "dtype.h"

namespace surogate {
namespace {

bool multiply(int64_t a, int64_t b, int64_t *result) { return !__builtin_mul_overflow(a, b, result); }
bool add(int64_t a, int64_t b, int64_t *result) { return !__builtin_add_overflow(a, b, result); }

void check_blocks(const sg_tensor &tensor, const sg_dtype_info &info) {
  if (info.block_elems == 1) return;
  if (tensor.rank == 0 || tensor.shape[tensor.rank - 1] % info.block_elems != 0) {
    throw Error("the last axis of a " + std::string(info.name) + " tensor must be a multiple of " +
                std::to_string(info.block_elems) + " elements, got " + shape_text(tensor));
  }
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    bool last = axis == tensor.rank - 1;
    if (last ? tensor.strides[axis] != 1 : tensor.strides[axis] % info.block_elems != 0) {
      throw Error("a " + std::string(info.name) + " tensor " + shape_text(tensor) + " has stride " +
                  std::to_string(tensor.strides[axis]) + " along axis " + std::to_string(axis) +
                  ": blocks may not be split");
    }
  }
}

}  // namespace

int64_t extent_bytes(const sg_tensor &tensor) {
  const sg_dtype_info *info = dtype_info(tensor.dtype);
  if (info == nullptr) throw Error("unknown dtype code " + std::to_string(tensor.dtype));
  if (tensor.rank < 0 || tensor.rank > SG_MAX_RANK) {
    throw Error("rank " + std::to_string(tensor.rank) + " is not in 0 .. " + std::to_string(SG_MAX_RANK));
  }
  int64_t last = 0;  // index of the last element
  bool empty = false;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] < 0 || tensor.strides[axis] < 0) {
      throw Error("negative size or stride along axis " + std::to_string(axis) + " of " + shape_text(tensor));
    }
    empty = empty || tensor.shape[axis] == 0;
  }
  check_blocks(tensor, *info);
  if (empty) return 0;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    int64_t reach = 0;
    if (!multiply(tensor.shape[axis] - 1, tensor.strides[axis], &reach) || !add(last, reach, &last)) {
      throw Error("the size of " + shape_text(tensor) + " overflows");
    }
  }
  int64_t bytes = 0;
  if (!add(last, 1, &last) || !multiply(last / info->block_elems, info->block_bytes, &bytes)) {
    throw Error("the size of " + shape_text(tensor) + " overflows");
  }
  return bytes;
}

sg_tensor dense_tensor(void *data, int32_t dtype, std::span<const int64_t> shape) {
  if (shape.size() > SG_MAX_RANK) {
    throw Error("rank " + std::to_string(shape.size()) + " is not in 0 .. " + std::to_string(SG_MAX_RANK));
  }
  sg_tensor tensor{};
  tensor.struct_size = sizeof(tensor);
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (int32_t axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = stride;
    if (shape[axis] > 0 && !multiply(stride, shape[axis], &stride)) throw Error("the size of a tensor overflows");
  }
  extent_bytes(tensor);
  return tensor;
}

std::string shape_text(const sg_tensor &tensor) {
  std::string text = "[";
  for (int32_t axis = 0; axis < tensor.rank && axis < SG_MAX_RANK; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(tensor.shape[axis]);
  }
  return text + "]";
}

std::string operand_text(const std::string &name, const sg_tensor &tensor) {
  return name + ": " + dtype_name(tensor.dtype) + shape_text(tensor);
}

}  // namespace surogate
