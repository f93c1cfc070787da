// linear, linear_input_grad and linear_weight_grad on oneDNN, for operands that are stored as it takes them: f32 x f32
// and bf16 x bf16. The library is opened at run time (surogate_core.engine loads it beforehand, from wherever it is
// installed); where it is missing these kernels support nothing and our own run.
//
// The parallelism stays ours: a product is cut into tasks by shape alone, each one primitive on one thread, so results
// depend neither on the number of workers nor on oneDNN's own scheduling.
#include <dlfcn.h>
#include <dnnl.h>

#include <algorithm>
#include <memory>
#include <vector>

#define SG_ISA baseline
#include "kernel.h"

namespace sg::cpu::SG_ISA {
namespace {

#define SG_ONEDNN_FUNCTIONS(X)                                                                                   \
  X(engine_create) X(stream_create) X(memory_desc_create_with_strides)                                           \
  X(memory_desc_destroy) X(memory_desc_get_size) X(primitive_attr_create) X(primitive_attr_destroy)              \
  X(primitive_attr_set_scratchpad_mode) X(primitive_attr_set_post_ops) X(post_ops_create) X(post_ops_destroy)    \
  X(post_ops_append_sum) X(post_ops_append_eltwise) X(matmul_primitive_desc_create) X(primitive_desc_query_md)   \
  X(primitive_desc_destroy) X(primitive_create) X(primitive_destroy) X(memory_create) X(memory_destroy)          \
  X(memory_set_data_handle) X(primitive_execute)

struct Library {
#define X(name) decltype(&dnnl_##name) name = nullptr;
  SG_ONEDNN_FUNCTIONS(X)
#undef X
  void (*omp_set_num_threads)(int) = nullptr;
  int (*omp_get_max_threads)() = nullptr;
  dnnl_engine_t engine = nullptr;
  dnnl_stream_t stream = nullptr;
  bool ready = false;

  Library() {
    void *handle = dlopen("libdnnl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return;
#define X(name) \
  if ((name = reinterpret_cast<decltype(name)>(dlsym(handle, "dnnl_" #name))) == nullptr) return;
    SG_ONEDNN_FUNCTIONS(X)
#undef X
    omp_set_num_threads = reinterpret_cast<decltype(omp_set_num_threads)>(dlsym(handle, "omp_set_num_threads"));
    omp_get_max_threads = reinterpret_cast<decltype(omp_get_max_threads)>(dlsym(handle, "omp_get_max_threads"));
    if (omp_set_num_threads == nullptr || omp_get_max_threads == nullptr) return;
    ready = engine_create(&engine, dnnl_cpu, 0) == dnnl_success &&
            stream_create(&stream, engine, dnnl_stream_default_flags) == dnnl_success;
  }
};
const Library &library() {
  static const Library instance;
  return instance;
}

// oneDNN's threads are OpenMP's. For the time of a task this thread has a team of one.
struct OneThread {
  int before = library().omp_get_max_threads();
  OneThread() { library().omp_set_num_threads(1); }
  ~OneThread() { library().omp_set_num_threads(before); }
};

enum class Product { forward, input_grad, weight_grad };

struct Problem {
  int64_t m, n, k;
  bool a_transposed, b_transposed;
  dnnl_data_type_t in, out, bias_type;
  const sg_tensor *a, *b, *bias, *addend, *c;
  float alpha;

  int64_t row_a() const { return a->strides[0]; }  // elements from row to row
  int64_t row_b() const { return b->strides[0]; }
  int64_t row_c() const { return c->strides[0]; }
  int64_t size_in() const { return in == dnnl_f32 ? 4 : 2; }
  int64_t size_out() const { return out == dnnl_f32 ? 4 : 2; }
};

dnnl_data_type_t type_of(const sg_tensor *t) { return t->dtype == SG_F32 ? dnnl_f32 : dnnl_bf16; }

template <Product product>
bool read(const sg_call *call, Problem *p) {
  if (call->num_inputs < 2 || call->num_outputs < 1) return false;
  p->a = input(call, 0), p->b = input(call, 1), p->c = output(call, 0);
  if (p->a == nullptr || p->b == nullptr || p->c == nullptr) return false;
  if (p->a->rank != 2 || p->b->rank != 2 || p->c->rank != 2) return false;
  if (!has_dense_rows(p->a) || !has_dense_rows(p->b) || !has_dense_rows(p->c)) return false;
  if (!is_activation(p->a) || p->b->dtype != p->a->dtype || !is_activation(p->c)) return false;
  if (p->a->dtype == SG_F32 && p->c->dtype != SG_F32) return false;
  p->bias = product == Product::forward ? input(call, 2) : nullptr;
  p->addend = product == Product::forward ? input(call, 3) : product == Product::input_grad ? input(call, 2) : p->c;
  p->alpha = static_cast<float>(attr_float(call, "alpha", 1.0));
  if (p->alpha == 0.0f) return false;  // an addend is divided by it
  p->a_transposed = product == Product::weight_grad, p->b_transposed = product == Product::forward;
  p->m = p->a->shape[p->a_transposed], p->k = p->a->shape[!p->a_transposed];
  p->n = p->b->shape[!p->b_transposed];
  if (p->b->shape[p->b_transposed] != p->k || p->c->shape[0] != p->m || p->c->shape[1] != p->n) return false;
  if (p->m == 0 || p->n == 0 || p->k == 0) return false;
  if (product == Product::weight_grad && p->c->dtype != SG_F32) return false;
  if (p->addend != nullptr && (p->addend->dtype != p->c->dtype || num_elements(p->addend) != p->m * p->n)) return false;
  if (p->addend != nullptr && !has_dense_rows(p->addend)) return false;
  // oneDNN adds the bias before it scales.
  if (p->bias != nullptr && (p->bias->dtype != SG_F32 || p->alpha != 1.0f || num_elements(p->bias) != p->n))
    return false;
  p->in = type_of(p->a), p->out = type_of(p->c);
  return true;
}

// One primitive and, for each worker, the memory objects that its tasks point at their operands.
struct Block {
  dnnl_primitive_t primitive = nullptr;
  size_t scratch = 0;
  struct Arguments {
    dnnl_memory_t a = nullptr, b = nullptr, bias = nullptr, c = nullptr, scratch = nullptr;
  };
  std::vector<Arguments> workers;

  Block() = default;
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;
  ~Block() {
    const Library &lib = library();
    for (const Arguments &w : workers) {
      for (dnnl_memory_t memory : {w.a, w.b, w.bias, w.c, w.scratch}) {
        if (memory != nullptr) lib.memory_destroy(memory);
      }
    }
    if (primitive != nullptr) lib.primitive_destroy(primitive);
  }
};

// Releases what it holds; oneDNN's objects are plain handles.
template <class Handle>
struct Owned {
  Handle handle = nullptr;
  dnnl_status_t (*destroy)(Handle);
  explicit Owned(dnnl_status_t (*destroy_)(Handle)) : destroy(destroy_) {}
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  ~Owned() {
    if (handle != nullptr) destroy(handle);
  }
};

bool describe(Owned<dnnl_memory_desc_t> *desc, int64_t rows, int64_t columns, dnnl_data_type_t type, int64_t row_stride,
              int64_t column_stride) {
  const dnnl_dims_t dims = {rows, columns}, strides = {row_stride, column_stride};
  return library().memory_desc_create_with_strides(&desc->handle, 2, dims, type, strides) == dnnl_success;
}

bool set_attributes(dnnl_primitive_attr_t attr, const Problem &p) {
  const Library &lib = library();
  Owned<dnnl_post_ops_t> ops(lib.post_ops_destroy);
  if (lib.primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user) != dnnl_success) return false;
  if (lib.post_ops_create(&ops.handle) != dnnl_success) return false;
  // Only a sum that comes first stays with oneDNN's fast kernels: alpha * (a b + addend / alpha). After the factor it would
  // go to the reference loops, which take hundreds of milliseconds.
  if (p.addend != nullptr &&
      lib.post_ops_append_sum(ops.handle, 1.0f / p.alpha, 0, dnnl_data_type_undef) != dnnl_success) {
    return false;
  }
  if (p.alpha != 1.0f && lib.post_ops_append_eltwise(ops.handle, dnnl_eltwise_linear, p.alpha, 0.0f) != dnnl_success) {
    return false;
  }
  return lib.primitive_attr_set_post_ops(attr, ops.handle) == dnnl_success;
}

bool create_block(const Problem &p, int64_t rows, int64_t columns, int workers, Block *block) {
  const Library &lib = library();
  Owned<dnnl_memory_desc_t> a(lib.memory_desc_destroy), b(lib.memory_desc_destroy), c(lib.memory_desc_destroy),
      bias(lib.memory_desc_destroy);
  Owned<dnnl_primitive_attr_t> attr(lib.primitive_attr_destroy);
  Owned<dnnl_primitive_desc_t> desc(lib.primitive_desc_destroy);
  if (!describe(&a, rows, p.k, p.in, p.a_transposed ? 1 : p.row_a(), p.a_transposed ? p.row_a() : 1)) return false;
  if (!describe(&b, p.k, columns, p.in, p.b_transposed ? 1 : p.row_b(), p.b_transposed ? p.row_b() : 1)) return false;
  if (!describe(&c, rows, columns, p.out, p.row_c(), 1)) return false;
  if (p.bias != nullptr && !describe(&bias, 1, columns, dnnl_f32, columns, 1)) return false;
  if (lib.primitive_attr_create(&attr.handle) != dnnl_success || !set_attributes(attr.handle, p)) return false;
  if (lib.matmul_primitive_desc_create(&desc.handle, lib.engine, a.handle, b.handle, bias.handle, c.handle,
                                       attr.handle) != dnnl_success) {
    return false;
  }
  if (lib.primitive_create(&block->primitive, desc.handle) != dnnl_success) return false;
  const_dnnl_memory_desc_t scratch = lib.primitive_desc_query_md(desc.handle, dnnl_query_scratchpad_md, 0);
  block->scratch = lib.memory_desc_get_size(scratch);
  block->workers.resize(static_cast<size_t>(workers));
  auto create = [&](dnnl_memory_t *memory, const_dnnl_memory_desc_t of) {
    return lib.memory_create(memory, of, lib.engine, DNNL_MEMORY_NONE) == dnnl_success;
  };
  for (Block::Arguments &w : block->workers) {
    if (!create(&w.a, a.handle) || !create(&w.b, b.handle) || !create(&w.c, c.handle)) return false;
    if (!create(&w.scratch, scratch) || (p.bias != nullptr && !create(&w.bias, bias.handle))) return false;
  }
  return true;
}

// Blocks of rows and columns, the last ones shorter.
struct Cut {
  int64_t rows, columns;
  Cut(Product product, const Problem &p) {
    rows = std::min<int64_t>(p.m, product == Product::weight_grad ? 192 : 256);
    columns = product == Product::weight_grad || p.m < 1024 ? std::min<int64_t>(p.n, 192) : p.n;
  }
};

struct Plan {
  Block blocks[2][2];  // [last row block is shorter][last column block is shorter]
  size_t scratch = 0;
};

template <Product product>
int32_t supports(const sg_call *call) {
  Problem p;
  if (!library().ready || !read<product>(call, &p)) return 0;
  return p.in == dnnl_f32 ? 45 : 35;
}

// The scratch that primitives want is known when they are made, after the workspace is asked for; it is theirs.
template <Product product>
int32_t prepare(const sg_call *call, void **state) {
  Problem p;
  if (!read<product>(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const Cut cut(product, p);
  auto plan = std::make_unique<Plan>();
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      const int64_t rows = i == 0 ? cut.rows : p.m % cut.rows, columns = j == 0 ? cut.columns : p.n % cut.columns;
      if (rows == 0 || columns == 0) continue;
      Block &block = plan->blocks[i][j];
      if (!create_block(p, rows, columns, num_workers(call), &block)) {
        return fail(call, "%s: oneDNN makes no matmul of %lld x %lld x %lld", call->op, static_cast<long long>(rows),
                    static_cast<long long>(columns), static_cast<long long>(p.k));
      }
    }
  }
  *state = plan.release();
  return SG_OK;
}

void release(void *state) { delete static_cast<Plan *>(state); }

template <Product product>
size_t workspace(const sg_call *call) {
  Problem p;
  if (!read<product>(call, &p)) return 0;
  const Cut cut(product, p);
  size_t most = 0;
  for (int64_t rows : {cut.rows, p.m % cut.rows}) {
    for (int64_t columns : {cut.columns, p.n % cut.columns}) {
      Block block;
      if (rows > 0 && columns > 0 && create_block(p, rows, columns, 0, &block)) most = std::max(most, block.scratch);
    }
  }
  return (most + 4096) / 64 * 64 * static_cast<size_t>(num_workers(call));
}

void copy_addend(const Problem &p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  if (p.addend == nullptr || p.addend->data == p.c->data) return;
  const int64_t size = p.size_out();
  for (int64_t i = row; i < row + rows; ++i) {
    std::memcpy(data<char>(p.c) + (i * p.row_c() + column) * size,
                data<const char>(p.addend) + (i * p.addend->strides[0] + column) * size,
                static_cast<size_t>(columns * size));
  }
}

bool run_block(const Problem &p, const Block &block, int worker, int64_t row, int64_t column, char *scratch) {
  const Library &lib = library();
  const Block::Arguments &w = block.workers[static_cast<size_t>(worker)];
  lib.memory_set_data_handle(w.a, data<char>(p.a) + row * (p.a_transposed ? 1 : p.row_a()) * p.size_in());
  lib.memory_set_data_handle(w.b, data<char>(p.b) + column * (p.b_transposed ? p.row_b() : 1) * p.size_in());
  lib.memory_set_data_handle(w.c, data<char>(p.c) + (row * p.row_c() + column) * p.size_out());
  lib.memory_set_data_handle(w.scratch, scratch);
  dnnl_exec_arg_t arguments[5] = {{DNNL_ARG_SRC, w.a}, {DNNL_ARG_WEIGHTS, w.b}, {DNNL_ARG_DST, w.c},
                                  {DNNL_ARG_SCRATCHPAD, w.scratch}, {DNNL_ARG_BIAS, w.bias}};
  if (p.bias != nullptr) lib.memory_set_data_handle(w.bias, data<float>(p.bias) + column);
  return lib.primitive_execute(block.primitive, lib.stream, p.bias != nullptr ? 5 : 4, arguments) == dnnl_success;
}

template <Product product>
int32_t run(const sg_call *call) {
  Problem p;
  if (!read<product>(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const Cut cut(product, p);
  const auto *plan = static_cast<const Plan *>(call->state);
  const int64_t across = (p.n + cut.columns - 1) / cut.columns, down = (p.m + cut.rows - 1) / cut.rows;
  const size_t each = call->workspace_size / static_cast<size_t>(num_workers(call)) / 64 * 64;
  bool failed = false;
  parallel_for(call, across * down, [&](int64_t task, int worker) {
    const int64_t row = task / across * cut.rows, column = task % across * cut.columns;
    const int64_t rows = std::min(cut.rows, p.m - row), columns = std::min(cut.columns, p.n - column);
    const Block &block = plan->blocks[rows < cut.rows][columns < cut.columns];
    const OneThread one_thread;
    copy_addend(p, row, rows, column, columns);
    char *scratch = static_cast<char *>(call->workspace) + each * static_cast<size_t>(worker);
    if (!run_block(p, block, worker, row, column, scratch)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return failed ? fail(call, "%s: oneDNN failed to run a matmul it had made", call->op) : SG_OK;
}

template <Product product>
constexpr sg_kernel kernel(const char *op, int32_t in_place_input) {
  const int traits = in_place_input >= 0 ? SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE : SG_TRAIT_DETERMINISTIC;
  return {sizeof(sg_kernel), op, "cpu", "onednn", static_cast<uint32_t>(traits), in_place_input, supports<product>,
          workspace<product>, prepare<product>, release, run<product>};
}

constexpr sg_kernel linear = kernel<Product::forward>("linear", 3);
constexpr sg_kernel linear_input_grad = kernel<Product::input_grad>("linear_input_grad", 2);
constexpr sg_kernel linear_weight_grad = kernel<Product::weight_grad>("linear_weight_grad", -1);
SG_REGISTER_KERNEL(linear);
SG_REGISTER_KERNEL(linear_input_grad);
SG_REGISTER_KERNEL(linear_weight_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA
