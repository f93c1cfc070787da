#include "dtype.h"

namespace surogate {
namespace {

struct Row {
  int32_t code;
  sg_dtype_info info;
};

constexpr sg_dtype_info info(const char *name, int64_t elems, int64_t bytes) {
  return {sizeof(sg_dtype_info), name, elems, bytes};
}

// A block of a quantised type: scales (and minimums) as f16, then the packed quants; see the kernels for each layout.
constexpr Row kRows[] = {
    {SG_F32, info("f32", 1, 4)},       {SG_F16, info("f16", 1, 2)},       {SG_BF16, info("bf16", 1, 2)},
    {SG_F64, info("f64", 1, 8)},       {SG_I8, info("i8", 1, 1)},         {SG_U8, info("u8", 1, 1)},
    {SG_I32, info("i32", 1, 4)},       {SG_I64, info("i64", 1, 8)},       {SG_Q4_0, info("q4_0", 32, 18)},
    {SG_Q4_1, info("q4_1", 32, 20)},   {SG_Q5_0, info("q5_0", 32, 22)},   {SG_Q5_1, info("q5_1", 32, 24)},
    {SG_Q8_0, info("q8_0", 32, 34)},   {SG_Q4_K, info("q4_k", 256, 144)}, {SG_Q5_K, info("q5_k", 256, 176)},
    {SG_Q6_K, info("q6_k", 256, 210)},
};

}  // namespace

const sg_dtype_info *dtype_info(int32_t dtype) {
  for (const Row &row : kRows) {
    if (row.code == dtype) return &row.info;
  }
  return nullptr;
}

int32_t dtype_from_name(std::string_view name) {
  std::string known;
  for (const Row &row : kRows) {
    if (name == row.info.name) return row.code;
    known += known.empty() ? "" : ", ";
    known += row.info.name;
  }
  throw Error("unknown dtype '" + std::string(name) + "'", "known dtypes: " + known);
}

std::string dtype_name(int32_t dtype) {
  const sg_dtype_info *found = dtype_info(dtype);
  return found != nullptr ? found->name : "dtype " + std::to_string(dtype);
}

}  // namespace surogate
