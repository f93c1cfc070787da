// What every CPU kernel source includes: reading a call's operands and attributes, running tasks on the pool, reporting
// an error, and registering the kernel.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "isa.h"
#include "surogate/abi.h"

namespace sg::cpu {

// Appends to the library's table; called by static initialisers, so the order of kernels is unspecified.
bool register_kernel(const sg_kernel *kernel);

}  // namespace sg::cpu

// Registers `variable` (a namespace-scope `constexpr sg_kernel` or `const sg_kernel`). Once per kernel.
#define SG_REGISTER_KERNEL(variable) \
  [[maybe_unused]] static const bool variable##_registered = ::sg::cpu::register_kernel(&variable)

namespace sg::cpu::SG_ISA {

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

// parallel_for(call, tasks, [&](int64_t task, int worker) { ... })
template <class Body>
inline void parallel_for(const sg_call *call, int64_t num_tasks, Body &&body) {
  using Plain = std::remove_reference_t<Body>;
  call->host->parallel_for(
      call->stream, num_tasks,
      [](void *context, int64_t task, int32_t worker) { (*static_cast<Plain *>(context))(task, worker); },
      const_cast<void *>(static_cast<const void *>(&body)));
}
inline int num_workers(const sg_call *call) { return call->host->num_workers(call->stream); }

// Splits `rows` into tasks of whole rows, each of at least `min_elements` elements, so that small operands stay on one
// core. The split depends on the shape alone. body(begin_row, end_row).
template <class Body>
inline void parallel_rows(const sg_call *call, int64_t rows, int64_t row_elements, Body &&body,
                          int64_t min_elements = 16384) {
  int64_t per_task = row_elements > 0 ? (min_elements + row_elements - 1) / row_elements : rows;
  if (per_task < 1) per_task = 1;
  int64_t tasks = (rows + per_task - 1) / per_task;
  parallel_for(call, tasks, [&](int64_t task, int) {
    int64_t begin = task * per_task;
    body(begin, begin + per_task < rows ? begin + per_task : rows);
  });
}

}  // namespace sg::cpu::SG_ISA
