// Reading a call: operands, attributes, shapes; and reporting an error. Shared by the backends. Everything is inline in the
// namespace that SG_CALL_NAMESPACE names before inclusion: the CPU backend compiles it once for each instruction set, and
// an inline function that one of them shares with another would run the wrong one's code.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "surogate/abi.h"

namespace SG_CALL_NAMESPACE {

inline const sg_tensor *input(const sg_call *call, int i) {
  if (i >= call->num_inputs) return nullptr;
  const sg_tensor *t = call->inputs[i];
  return t != nullptr && t->data != nullptr ? t : nullptr;
}
inline const sg_tensor *output(const sg_call *call, int i) {
  if (i >= call->num_outputs) return nullptr;
  const sg_tensor *t = call->outputs[i];
  return t != nullptr && t->data != nullptr ? t : nullptr;
}

inline const sg_attr *find_attr(const sg_call *call, const char *name) {
  for (int i = 0; i < call->num_attrs; ++i) {
    if (std::strcmp(call->attrs[i].name, name) == 0) return &call->attrs[i];
  }
  return nullptr;
}
inline int64_t attr_int(const sg_call *call, const char *name, int64_t fallback) {
  const sg_attr *a = find_attr(call, name);
  return a == nullptr ? fallback : (a->kind == SG_ATTR_FLOAT ? static_cast<int64_t>(a->f) : a->i);
}
inline double attr_float(const sg_call *call, const char *name, double fallback) {
  const sg_attr *a = find_attr(call, name);
  return a == nullptr ? fallback : (a->kind == SG_ATTR_INT ? static_cast<double>(a->i) : a->f);
}
inline const char *attr_string(const sg_call *call, const char *name, const char *fallback) {
  const sg_attr *a = find_attr(call, name);
  return a == nullptr || a->kind != SG_ATTR_STRING ? fallback : a->s;
}

inline int64_t num_elements(const sg_tensor *t) {
  int64_t n = 1;
  for (int i = 0; i < t->rank; ++i) n *= t->shape[i];
  return n;
}
// Elements in all axes but the last `inner`.
inline int64_t num_rows(const sg_tensor *t, int inner = 1) {
  int64_t n = 1;
  for (int i = 0; i < t->rank - inner; ++i) n *= t->shape[i];
  return n;
}
inline int64_t last_dim(const sg_tensor *t) { return t->rank == 0 ? 1 : t->shape[t->rank - 1]; }

inline bool is_dense(const sg_tensor *t) {
  int64_t expected = 1;
  for (int i = t->rank - 1; i >= 0; --i) {
    if (t->shape[i] != 1 && t->strides[i] != expected) return false;
    expected *= t->shape[i];
  }
  return true;
}
inline bool is_fixed(const sg_tensor *t) {
  return t->struct_size > offsetof(sg_tensor, flags) && (t->flags & SG_TENSOR_FIXED) != 0;
}
inline bool is_activation(const sg_tensor *t) { return t->dtype == SG_F32 || t->dtype == SG_BF16; }
// Every operand present is dense. Kernels that read strided operands check for themselves.
inline bool all_dense(const sg_call *call) {
  for (int i = 0; i < call->num_inputs; ++i) {
    if (const sg_tensor *t = input(call, i); t != nullptr && !is_dense(t)) return false;
  }
  for (int i = 0; i < call->num_outputs; ++i) {
    if (const sg_tensor *t = output(call, i); t != nullptr && !is_dense(t)) return false;
  }
  return true;
}

template <class T>
inline T *data(const sg_tensor *t) {
  return t == nullptr ? nullptr : static_cast<T *>(t->data);
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
inline int32_t fail(const sg_call *call, const char *format, ...) {
  if (call->error != nullptr && call->error_size > 0) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(call->error, call->error_size, format, args);
    va_end(args);
  }
  return SG_ERROR;
}

// All axes but the first are dense; rows may be apart, and don't overlap.
inline bool has_dense_rows(const sg_tensor *t) {
  int64_t expected = 1;
  for (int i = t->rank - 1; i >= 1; --i) {
    if (t->shape[i] != 1 && t->strides[i] != expected) return false;
    expected *= t->shape[i];
  }
  return t->rank == 0 || t->shape[0] <= 1 || t->strides[0] >= expected;
}

inline bool same_shape(const sg_tensor *a, const sg_tensor *b) {
  if (a->rank != b->rank) return false;
  for (int i = 0; i < a->rank; ++i) {
    if (a->shape[i] != b->shape[i]) return false;
  }
  return true;
}

}  // namespace SG_CALL_NAMESPACE
