// linear, linear_input_grad and linear_weight_grad: products of activations [T, *] and a weight [N, K].
//
//   y[T, N]   = alpha x weight^T + bias + addend        2 T N K FLOPs each, at the rate of the tensor cores for bf16
//   dx[T, K]  = alpha dy weight + addend
//   dw[N, K] += alpha dy^T x
//
// An operand that is stored in another dtype than the product runs in is converted into the workspace first: the weight
// to the activation's dtype, whatever format it is stored in; of a weight gradient's two the bf16 one to fp32; the bias
// to the result's dtype, which is what the library's epilogue takes. Addend and accumulation are the product's own C.
#include <memory>
#include <new>
#include <string>

#include "convert_rows.h"
#include "dequantize.h"
#include "gemm.h"
#include "gemm_narrow.h"
#include "kernel.cuh"

namespace sg::cuda {
namespace {

enum class LinearOp { forward, input_grad, weight_grad };

bool is_plain(int32_t dtype) { return dtype == SG_F32 || dtype == SG_BF16 || dtype == SG_F16; }

// Rows of plain elements, which may be apart; blocks lie dense.
bool is_matrix(const sg_tensor *t) {
  if (t == nullptr || t->rank != 2) return false;
  return is_plain(t->dtype) ? has_dense_rows(t) : is_quantised(t->dtype) && is_dense(t);
}
bool is_matrix_of(const sg_tensor *t, int64_t rows, int64_t columns) {
  return is_matrix(t) && t->shape[0] == rows && t->shape[1] == columns;
}

int64_t row_stride(const sg_tensor *t) { return t->shape[0] <= 1 ? t->shape[1] : t->strides[0]; }

struct LinearCall {
  const sg_tensor *left, *right, *bias, *addend, *out;
  GemmProblem problem;
};

// Checks dtypes, shapes and strides; false when the product cannot be run.
template <LinearOp op>
bool read_linear(const sg_call *call, LinearCall *l) {
  *l = {input(call, 0),
        input(call, 1),
        op == LinearOp::forward ? input(call, 2) : nullptr,
        op == LinearOp::forward      ? input(call, 3)
        : op == LinearOp::input_grad ? input(call, 2)
                                     : nullptr,
        output(call, 0),
        {}};
  const sg_tensor *left = l->left, *right = l->right, *bias = l->bias, *out = l->out;
  if (!is_matrix(left) || !is_matrix(right) || !is_matrix(out) || !is_activation(left) || !is_activation(out)) {
    return false;
  }
  GemmProblem &p = l->problem;
  if (op == LinearOp::weight_grad) {
    if (!is_activation(right)) return false;
    p.m = left->shape[1], p.n = right->shape[1], p.k = left->shape[0];
    p.transpose_a = true;
    p.ab_dtype = left->dtype == right->dtype ? left->dtype : SG_F32;
  } else {
    p.m = left->shape[0], p.k = left->shape[1];
    p.n = right->shape[op == LinearOp::forward ? 0 : 1];
    p.transpose_b = op == LinearOp::forward;
    p.ab_dtype = left->dtype;
  }
  if (right->shape[p.transpose_b ? 1 : 0] != p.k || out->shape[0] != p.m || out->shape[1] != p.n) return false;
  if (bias != nullptr && (bias->rank != 1 || bias->shape[0] != p.n || !is_plain(bias->dtype) || !is_dense(bias))) {
    return false;
  }
  if (l->addend != nullptr && (l->addend->dtype != out->dtype || !is_matrix_of(l->addend, p.m, p.n))) return false;
  const bool converts_right = right->dtype != p.ab_dtype;
  p.d_dtype = out->dtype;
  p.lda = left->dtype == p.ab_dtype ? row_stride(left) : left->shape[1];
  p.ldb = converts_right ? right->shape[1] : row_stride(right);
  p.ldd = row_stride(out);
  if (op == LinearOp::weight_grad) l->addend = out;
  p.add_c = l->addend != nullptr;
  p.ldc = p.add_c ? row_stride(l->addend) : p.ldd;
  p.has_bias = bias != nullptr;
  return true;
}

constexpr size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Bytes of an operand in another dtype; 0 where it is read as it lies.
size_t converted_bytes(const sg_tensor *t, int32_t dtype) {
  if (t == nullptr || t->dtype == dtype) return 0;
  return padded(static_cast<size_t>(num_elements(t)) * (dtype == SG_F32 ? 4 : 2));
}

// The operand's elements in `dtype`: where they lie, or converted to *workspace, which is moved on.
const void *in_dtype(const sg_tensor *t, int32_t dtype, char **workspace, cudaStream_t queue) {
  if (t == nullptr) return nullptr;
  const size_t bytes = converted_bytes(t, dtype);
  if (bytes == 0) return t->data;
  char *to = *workspace;
  *workspace += bytes;
  const int64_t rows = num_rows(t), columns = last_dim(t);
  if (is_plain(t->dtype)) {
    const int64_t stride = t->rank == 2 ? row_stride(t) : columns;
    convert_rows(t->data, t->dtype, rows, columns, stride, to, dtype, queue);
  } else if (dtype == SG_F32) {
    dequantize_rows(t->data, t->dtype, rows, columns, reinterpret_cast<float *>(to), queue);
  } else {
    dequantize_rows(t->data, t->dtype, rows, columns, reinterpret_cast<bf16 *>(to), queue);
  }
  return to;
}

template <LinearOp op, GemmKernel kernel>
int32_t supports(const sg_call *call) {
  LinearCall l;
  if (!read_linear<op>(call, &l)) return 0;
  if (kernel == GemmKernel::tiled) return 10;
  if (kernel == GemmKernel::library) return 20;  // runs `narrow` itself where that is faster
  return narrow_supports(l.problem) && narrow_workspace_bytes(l.problem) <= gemm_workspace_bytes(l.problem) ? 15 : 0;
}

template <LinearOp op>
size_t workspace(const sg_call *call) {
  LinearCall l;
  if (!read_linear<op>(call, &l)) return 0;
  const GemmProblem &p = l.problem;
  return padded(gemm_workspace_bytes(p)) + converted_bytes(l.left, p.ab_dtype) + converted_bytes(l.right, p.ab_dtype) +
         converted_bytes(l.bias, p.d_dtype);
}

template <LinearOp op, GemmKernel kernel>
int32_t prepare(const sg_call *call, void **state) {
  LinearCall l;
  if (!read_linear<op>(call, &l)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  std::string error;
  std::unique_ptr<Gemm> gemm = Gemm::plan(l.problem, attr_string(call, "tuning", nullptr), &error, kernel);
  if (gemm == nullptr) return fail(call, "%s", error.c_str());
  *state = gemm.release();
  return SG_OK;
}

void release(void *state) { delete static_cast<Gemm *>(state); }

template <LinearOp op>
int32_t run(const sg_call *call) {
  LinearCall l;
  if (!read_linear<op>(call, &l)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const GemmProblem &p = l.problem;
  if (p.m == 0 || p.n == 0) return SG_OK;
  const cudaStream_t queue = stream(call);
  char *free_space = static_cast<char *>(call->workspace) + padded(gemm_workspace_bytes(p));
  const void *left = in_dtype(l.left, p.ab_dtype, &free_space, queue);
  const void *right = in_dtype(l.right, p.ab_dtype, &free_space, queue);
  const void *bias = in_dtype(l.bias, p.d_dtype, &free_space, queue);
  const void *addend = l.addend == nullptr ? nullptr : l.addend->data;
  return static_cast<const Gemm *>(call->state)
      ->run(call, static_cast<float>(attr_float(call, "alpha", 1.0)), left, right, addend, l.out->data, bias,
            call->workspace);
}

int32_t tuning(const sg_call *call, char *text, size_t text_size) {
  const std::string choice = static_cast<const Gemm *>(call->state)->tuning();
  if (choice.size() >= text_size) return fail(call, "%s: %zu bytes hold no tuning text", call->op, text_size);
  choice.copy(text, choice.size());
  text[choice.size()] = '\0';
  return SG_OK;
}

template <LinearOp op, GemmKernel kernel>
constexpr sg_kernel describe() {
  constexpr const char *op_names[] = {"linear", "linear_input_grad", "linear_weight_grad"};
  constexpr const char *kernel_names[] = {"cublaslt", "narrow", "tiled"};
  constexpr int32_t in_place[] = {3, 2, -1};
  constexpr auto which = static_cast<size_t>(op);
  sg_kernel k = describe_kernel(op_names[which], kernel_names[static_cast<size_t>(kernel)], in_place[which],
                                supports<op, kernel>, workspace<op>, run<op>);
  k.prepare = prepare<op, kernel>;
  k.release = release;
  if (kernel == GemmKernel::library) k.tuning = tuning;
  return k;
}

constexpr sg_kernel linear = describe<LinearOp::forward, GemmKernel::library>();
constexpr sg_kernel linear_narrow = describe<LinearOp::forward, GemmKernel::narrow>();
constexpr sg_kernel linear_tiled = describe<LinearOp::forward, GemmKernel::tiled>();
constexpr sg_kernel input_grad = describe<LinearOp::input_grad, GemmKernel::library>();
constexpr sg_kernel input_grad_narrow = describe<LinearOp::input_grad, GemmKernel::narrow>();
constexpr sg_kernel input_grad_tiled = describe<LinearOp::input_grad, GemmKernel::tiled>();
constexpr sg_kernel weight_grad = describe<LinearOp::weight_grad, GemmKernel::library>();
constexpr sg_kernel weight_grad_narrow = describe<LinearOp::weight_grad, GemmKernel::narrow>();
constexpr sg_kernel weight_grad_tiled = describe<LinearOp::weight_grad, GemmKernel::tiled>();
SG_REGISTER_KERNEL(linear);
SG_REGISTER_KERNEL(linear_narrow);
SG_REGISTER_KERNEL(linear_tiled);
SG_REGISTER_KERNEL(input_grad);
SG_REGISTER_KERNEL(input_grad_narrow);
SG_REGISTER_KERNEL(input_grad_tiled);
SG_REGISTER_KERNEL(weight_grad);
SG_REGISTER_KERNEL(weight_grad_narrow);
SG_REGISTER_KERNEL(weight_grad_tiled);

}  // namespace
}  // namespace sg::cuda
