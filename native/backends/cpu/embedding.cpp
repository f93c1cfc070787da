// embedding(tokens[T], weight[V, D]) -> y = scale * weight[tokens], from a table in any weight dtype, read in place;
// and embedding_weight_grad(tokens, dy) -> dweight[tokens] += scale * dy.
#include "quant.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t check_tokens(const sg_call *call, const sg_tensor *tokens, int64_t vocabulary) {
  const int32_t *ids = data<int32_t>(tokens);
  const int64_t at = find_outside(ids, tokens->shape[0], vocabulary);
  if (at < 0) return SG_OK;
  return fail(call, "token %d at position %lld is outside the vocabulary of %lld: is this the model's tokenizer?",
              ids[at], static_cast<long long>(at), static_cast<long long>(vocabulary));
}

bool is_ids(const sg_tensor *t) { return t->dtype == SG_I32 && t->rank == 1 && is_dense(t); }

int32_t supports(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *weight = input(call, 1), *y = output(call, 0);
  if (!tokens || !weight || !y || !is_ids(tokens) || weight->rank != 2 || y->rank != 2 || !all_dense(call)) return 0;
  if (!is_weight(weight->dtype) || !is_activation(y)) return 0;
  if (y->shape[0] != tokens->shape[0] || y->shape[1] != weight->shape[1]) return 0;
  return isa_score(SG_ISA_NAME);
}

// Rounded once, after scaling: a bf16 row would otherwise be rounded twice.
template <class Out>
void scaled_row(int32_t dtype, const void *row, int64_t n, vf scale, Out *out) {
  const bool quantised = with_format(dtype, [&](auto tag) {
    using F = typename decltype(tag)::type;
    const uint8_t *block = static_cast<const uint8_t *>(row);
    for (int64_t i = 0; i < n; i += F::kElements, block += F::kBytes) {
      F::decode(block, [&](int offset, vf v) SG_FLATTEN { vstore(out + i + offset, vmul(v, scale)); });
    }
  });
  if (quantised) return;
  auto copy = [&](auto in) {
    for_vectors(n, [&](int64_t i, int m) SG_FLATTEN { vstore_upto(out + i, vmul(vload_upto(in + i, m), scale), m); });
  };
  if (dtype == SG_F32) copy(static_cast<const float *>(row));
  if (dtype == SG_BF16) copy(static_cast<const bf16 *>(row));
  if (dtype == SG_F16) copy(static_cast<const f16 *>(row));
}

int32_t run(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *weight = input(call, 1), *y = output(call, 0);
  if (check_tokens(call, tokens, weight->shape[0]) != SG_OK) return SG_ERROR;
  const int64_t n = weight->shape[1], stride = row_bytes(weight->dtype, n);
  const int32_t *ids = data<int32_t>(tokens);
  const char *table = data<char>(weight);
  const vf scale = vset(static_cast<float>(attr_float(call, "scale", 1.0)));
  with_type(y, [&]<class Y>(Y) {
    parallel_rows(call, tokens->shape[0], n, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        scaled_row(weight->dtype, table + ids[t] * stride, n, scale, data<Y>(y) + t * n);
      }
    });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("embedding", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

// ---- embedding_weight_grad. A task owns some columns and walks all tokens in order: a token that occurs twice is
// added in order, and no two tasks meet in an element.

constexpr int64_t kColumns = 64;

int32_t grad_supports(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *dy = input(call, 1), *dweight = output(call, 0);
  if (!tokens || !dy || !dweight || !is_ids(tokens) || !all_dense(call)) return 0;
  if (dy->rank != 2 || dweight->rank != 2 || !is_activation(dy) || dweight->dtype != SG_F32) return 0;
  if (dy->shape[0] != tokens->shape[0] || dy->shape[1] != dweight->shape[1]) return 0;
  return isa_score(SG_ISA_NAME);
}

int32_t grad_run(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *dy = input(call, 1), *dweight = output(call, 0);
  if (check_tokens(call, tokens, dweight->shape[0]) != SG_OK) return SG_ERROR;
  const int64_t n = dy->shape[1], num_tokens = tokens->shape[0];
  const int32_t *ids = data<int32_t>(tokens);
  const vf scale = vset(static_cast<float>(attr_float(call, "scale", 1.0)));
  with_type(dy, [&]<class G>(G) {
    parallel_for(call, (n + kColumns - 1) / kColumns, [&](int64_t task, int) {
      const int64_t column = task * kColumns, width = n - column < kColumns ? n - column : kColumns;
      for (int64_t t = 0; t < num_tokens; ++t) {
        const G *in = data<G>(dy) + t * n + column;
        float *out = data<float>(dweight) + ids[t] * n + column;
        for_vectors(width, [&](int64_t i, int m) SG_FLATTEN {
          vstore_upto(out + i, vfma(vload_upto(in + i, m), scale, vload_upto(out + i, m)), m);
        });
      }
    });
  });
  return SG_OK;
}

constexpr sg_kernel grad_kernel = describe_kernel("embedding_weight_grad", -1, grad_supports, nullptr, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
