// attention as paged_attention computes it: a token of a packed batch gets the bits that it gets when its document is a
// sequence in a cache, whatever chunks it came in. For programs that must give the same numbers as a server.
//
// A document is a sequence of cache blocks of one row. Causal attention only.
#include "attention_forward.h"
#include "attention_paged.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int kInputs = 6, kMaxAttrs = 16;

// The call of paged_attention that a call of attention amounts to. Its integers lie at the beginning of the workspace.
struct PagedCall {
  sg_call call;
  sg_tensor sequences, positions, tables;
  const sg_tensor *inputs[kInputs];
  sg_attr attrs[kMaxAttrs];
  size_t integer_bytes;

  explicit PagedCall(const sg_call *given) : call(*given) {
    const int64_t tokens = input(given, 0)->shape[0], documents = input(given, 3)->shape[0] - 1;
    // Before there is a workspace the tensors only must not look absent.
    auto *at = given->workspace == nullptr ? reinterpret_cast<int32_t *>(64) : static_cast<int32_t *>(given->workspace);
    sequences = vector(at, tokens);
    positions = vector(at + tokens, tokens);
    tables = vector(at + 2 * tokens, documents);
    tables.rank = 2;
    tables.shape[1] = tables.strides[0] = tokens;
    tables.strides[1] = 1;
    integer_bytes = static_cast<size_t>(round_up((2 + documents) * tokens * 4, 64));
    const sg_tensor *const all[kInputs] = {input(given, 0), input(given, 1), input(given, 2), &sequences, &positions, &tables};
    std::copy(all, all + kInputs, inputs);
    attrs[0] = {sizeof(sg_attr), "block_size", SG_ATTR_INT, 1, 0.0, nullptr};  // the first by name
    std::copy(given->attrs, given->attrs + given->num_attrs, attrs + 1);
    call.num_inputs = kInputs;
    call.inputs = inputs;
    call.num_attrs = given->num_attrs + 1;
    call.attrs = attrs;
    call.workspace = static_cast<char *>(given->workspace) + integer_bytes;
  }
  PagedCall(const PagedCall &) = delete;
  PagedCall &operator=(const PagedCall &) = delete;

  static sg_tensor vector(int32_t *data, int64_t count) { return {sizeof(sg_tensor), data, SG_I32, 1, {count}, {1}}; }

  void write(const int32_t *starts) const {
    for (int64_t doc = 0; doc < tables.shape[0]; ++doc) {
      int32_t *table = static_cast<int32_t *>(tables.data) + doc * tables.strides[0];
      for (int32_t t = starts[doc]; t < starts[doc + 1]; ++t) {
        static_cast<int32_t *>(sequences.data)[t] = static_cast<int32_t>(doc);
        static_cast<int32_t *>(positions.data)[t] = t - starts[doc];
        table[t - starts[doc]] = t;
      }
    }
  }
};

int32_t supports(const sg_call *call) {
  if (!forward_supported(call) || attr_int(call, "causal", 1) == 0 || call->num_attrs >= kMaxAttrs) return 0;
  return isa_score(SG_ISA_NAME) / 10;  // slower than any other: chosen where its bits are wanted
}

size_t workspace(const sg_call *call) {
  const PagedCall paged(call);
  return paged.integer_bytes + paged_workspace<FloatArithmetic>(&paged.call);
}

int32_t run(const sg_call *call) {
  if (int32_t status = check_documents(call, input(call, 3), input(call, 0)->shape[0]); status != SG_OK) return status;
  const PagedCall paged(call);
  paged.write(data<const int32_t>(input(call, 3)));
  return input(call, 0)->dtype == SG_F32 ? Paged<FloatArithmetic, float, float>(&paged.call).run()
                                         : Paged<FloatArithmetic, bf16, bf16>(&paged.call).run();
}

constexpr sg_kernel kernel = {
    sizeof(sg_kernel), "attention", "cpu", "paged_" SG_ISA_NAME, SG_TRAIT_DETERMINISTIC | SG_TRAIT_ROW_INVARIANT, 0,
    supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
