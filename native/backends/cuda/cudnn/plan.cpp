// Plans by way of the cuDNN frontend. cuDNN is opened at run time: no symbol of it is linked.
//
// A packed batch goes to cuDNN as a batch of `documents` sequences, padded to `longest` in name only: each tensor has
// an array of offsets that says where a sequence starts, and the mask for padding takes the true lengths. Empty
// documents cost nothing. The compute capability is told to the frontend, which would open libcudart.so to ask.
#include "plan.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <bit>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;  // where the frontend looks its symbols up
}

namespace sg::cudnn {

namespace fe = cudnn_frontend;

int64_t Problem::heads_of(Role role) const {
  return role == kK || role == kV || role == kDk || role == kDv ? kv_heads : heads;
}

int64_t Problem::dim_of(Role role) const {
  if (role == kLse) return 1;
  return role == kV || role == kO || role == kDo || role == kDv ? value_dim : head_dim;
}

struct Plan {
  Problem problem;
  fe::graph::Graph graph;
  int64_t workspace = 0;
  cudnnHandle_t handle = nullptr;
};

namespace {

// Ragged statistics of the softmax and accumulators that cuDNN clears itself came with 9.6; nothing before 9.19 was
// tried.
constexpr size_t kMinimumVersion = 91900;

// Total tokens are rounded up to this, so that every buffer that the frontend carves from the workspace is aligned.
constexpr int64_t kTokenMultiple = 64;

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr int64_t tensor_id(Role role) { return 1 + role; }
constexpr int64_t offsets_id(Role role) { return 101 + role; }
constexpr int64_t kQueryLengthsId = 201, kKeyLengthsId = 202;

// A gradient lies as its tensor does, as a rule, and then takes the same offsets.
Role offsets_role(const Problem &problem, Role role) {
  Role twin = role;
  if (role == kDo) twin = kO;
  if (role == kDq) twin = kQ;
  if (role == kDk) twin = kK;
  if (role == kDv) twin = kV;
  return problem.strides[twin] == problem.strides[role] ? twin : role;
}

class Builder {
 public:
  explicit Builder(Plan &plan) : problem_(plan.problem), graph_(plan.graph) {
    query_lengths_ = integers("query_lengths", kQueryLengthsId, problem_.documents);
    key_lengths_ = integers("key_lengths", kKeyLengthsId, problem_.documents);
  }

  void forward() {
    fe::graph::SDPA_attributes attributes;
    attributes.set_generate_stats(true).set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    common(attributes);
    auto [o, lse] = graph_.sdpa(input(kQ), input(kK), input(kV), attributes);
    output(o, kO);
    output(lse, kLse);
  }

  void backward() {
    const int64_t total = (problem_.tokens + kTokenMultiple - 1) / kTokenMultiple * kTokenMultiple;
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_deterministic_algorithm(problem_.deterministic)
        .set_max_total_seq_len_q(total)
        .set_max_total_seq_len_kv(total);
    common(attributes);
    auto [dq, dk, dv] =
        graph_.sdpa_backward(input(kQ), input(kK), input(kV), input(kO), input(kDo), input(kLse), attributes);
    output(dq, kDq);
    output(dk, kDk);
    output(dv, kDv);
  }

 private:
  template <class Attributes>
  void common(Attributes &attributes) {
    attributes.set_name("attention")
        .set_attn_scale(problem_.scale)
        .set_padding_mask(true)
        .set_seq_len_q(query_lengths_)
        .set_seq_len_kv(key_lengths_);
    if (!problem_.causal) return;
    attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    if (problem_.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(problem_.window));
  }

  Tensor integers(const char *name, int64_t id, int64_t count) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_name(name)
                             .set_uid(id)
                             .set_dim({count, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(fe::DataType_t::INT32));
  }

  Tensor offsets(Role role) {
    const Role owner = offsets_role(problem_, role);
    if (offsets_[owner] == nullptr) {
      offsets_[owner] = integers("offsets", offsets_id(owner), problem_.documents + 1);
    }
    return offsets_[owner];
  }

  // [documents, heads, longest, dim], as the frontend wants it: a sequence's tokens are the third axis.
  void describe(fe::graph::Tensor_attributes &tensor, Role role) {
    const int64_t heads = problem_.heads_of(role), dim = problem_.dim_of(role), stride = problem_.strides[role];
    tensor.set_uid(tensor_id(role))
        .set_dim({problem_.documents, heads, problem_.longest, dim})
        .set_stride({problem_.longest * stride, dim, stride, 1})
        .set_data_type(role == kLse ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16)
        .set_ragged_offset(offsets(role));
  }

  Tensor input(Role role) {
    fe::graph::Tensor_attributes tensor;
    describe(tensor, role);
    return graph_.tensor(tensor);
  }

  void output(const Tensor &tensor, Role role) {
    tensor->set_output(true);
    describe(*tensor, role);
  }

  const Problem &problem_;
  fe::graph::Graph &graph_;
  Tensor query_lengths_, key_lengths_;
  Tensor offsets_[kRoles];
};

// Throws std::exception where the frontend does; false where cuDNN has no engine for the graph.
bool build(Plan &plan, int architecture) {
  plan.graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT)
      .set_sm_version(architecture);
  Builder builder(plan);
  if (plan.problem.backward) {
    builder.backward();
  } else {
    builder.forward();
  }
  const std::vector<fe::HeurMode_t> modes{fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK};
  return plan.graph.build(plan.handle, modes).is_good() && plan.graph.get_workspace_size(plan.workspace).is_good() &&
         plan.workspace >= 0;
}

using Key = std::vector<int64_t>;

Key key_of(const Problem &p, int device) {
  Key key{device, p.backward, p.deterministic, p.causal, p.window, std::bit_cast<int32_t>(p.scale),
          p.tokens, p.documents, p.longest, p.heads, p.kv_heads, p.head_dim, p.value_dim};
  key.insert(key.end(), p.strides, p.strides + p.num_roles());
  return key;
}

// Plans and handles of the process. They are never destroyed: cuDNN may be gone when static destructors run.
struct Plans {
  std::mutex mutex;  // also of the handles, whose stream is set before each use
  std::map<Key, std::unique_ptr<Plan>> plans;  // nullptr: cuDNN cannot
  std::map<int, cudnnHandle_t> handles;        // by device; nullptr: cuDNN cannot use the device
};

Plans &plans() {
  static Plans *all = new Plans;
  return *all;
}

cudnnHandle_t handle_of(Plans &all, int device) {
  auto [entry, fresh] = all.handles.try_emplace(device, nullptr);
  if (fresh && fe::detail::create_handle(&entry->second) != CUDNN_STATUS_SUCCESS) entry->second = nullptr;
  return entry->second;
}

std::unique_ptr<Plan> make_plan(Plans &all, const Problem &problem, int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return nullptr;
  }
  auto plan = std::make_unique<Plan>();
  plan->problem = problem;
  try {
    plan->handle = handle_of(all, device);
    if (plan->handle == nullptr || !build(*plan, 10 * major + minor)) return nullptr;
  } catch (const std::exception &) {  // how the frontend reports some of what it does not support
    return nullptr;
  }
  return plan;
}

}  // namespace

bool open_library(char *error, size_t error_size) {
  void *&library = fe::cudnn_dlhandle;
  if (library == nullptr) library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::snprintf(error, error_size, "cuDNN was not found (%s); install it: pip install nvidia-cudnn-cu13", dlerror());
    return false;
  }
  if (dlopen("libnvrtc.so.13", RTLD_NOW | RTLD_LOCAL) == nullptr) {  // or every plan would be refused, without a word
    std::snprintf(error, error_size, "NVRTC, which cuDNN compiles its attention with, was not found (%s); install it: "
                  "pip install nvidia-cuda-nvrtc", dlerror());
    return false;
  }
  if (fe::detail::get_backend_version() < kMinimumVersion) {
    std::snprintf(error, error_size, "cuDNN is version %s, attention needs 9.19 or later: "
                  "pip install --upgrade nvidia-cudnn-cu13", library_version());
    return false;
  }
  return true;
}

const char *library_version() {
  static const std::string text = [] {
    const size_t version = fe::detail::get_backend_version();
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
  }();
  return text.c_str();
}

const Plan *find_plan(const Problem &problem) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  Plans &all = plans();
  std::lock_guard lock(all.mutex);
  const Key key = key_of(problem, device);
  auto found = all.plans.find(key);
  if (found == all.plans.end()) found = all.plans.emplace(key, make_plan(all, problem, device)).first;
  return found->second.get();
}

const Problem &problem_of(const Plan *plan) { return plan->problem; }

size_t workspace_bytes(const Plan *plan) { return static_cast<size_t>(plan->workspace); }

bool execute(const Plan *plan, cudaStream_t stream, const Operands &operands, char *error, size_t error_size) {
  std::unordered_map<int64_t, void *> pointers;
  for (int i = 0; i < plan->problem.num_roles(); ++i) {
    const Role role = static_cast<Role>(i);
    pointers[tensor_id(role)] = operands.tensors[role];
    pointers[offsets_id(role)] = operands.offsets[role];
  }
  pointers[kQueryLengthsId] = pointers[kKeyLengthsId] = operands.lengths;
  std::lock_guard lock(plans().mutex);
  try {
    if (const cudnnStatus_t status = fe::detail::set_stream(plan->handle, stream); status != CUDNN_STATUS_SUCCESS) {
      std::snprintf(error, error_size, "cuDNN took no stream: %s", fe::detail::get_error_string(status));
      return false;
    }
    fe::error_t status = plan->graph.execute(plan->handle, pointers, operands.workspace);
    if (status.is_bad()) {
      std::snprintf(error, error_size, "cuDNN attention: %s", status.get_message().c_str());
      return false;
    }
  } catch (const std::exception &failure) {
    std::snprintf(error, error_size, "cuDNN attention: %s", failure.what());
    return false;
  }
  return true;
}

}  // namespace sg::cudnn
