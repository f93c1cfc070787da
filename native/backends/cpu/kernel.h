// What every CPU kernel source includes: reading a call's operands and attributes, running tasks on the pool, reporting
// an error, and registering the kernel.
#pragma once

#include <type_traits>

#include "isa.h"
#define SG_CALL_NAMESPACE sg::cpu::SG_ISA
#include "../read_call.h"

namespace sg::cpu {

// Appends to the library's table; called by static initialisers, so the order of kernels is unspecified.
bool register_kernel(const sg_kernel *kernel);

}  // namespace sg::cpu

// Registers `variable` (a namespace-scope `constexpr sg_kernel` or `const sg_kernel`). Once per kernel.
#define SG_REGISTER_KERNEL(variable) \
  [[maybe_unused]] static const bool variable##_registered = ::sg::cpu::register_kernel(&variable)

namespace sg::cpu::SG_ISA {

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
