// The candidates are the library's own short list and, for narrow products, our own kernel. All of them run on the same
// random operands, in turn, so that a device that clocks down meets them alike; before each one the cache is flushed,
// as a layer's weights never are in it when their turn comes, and so the host's part of a launch is hidden too. Of
// those within a hundredth of the best median the first in the library's order is taken: then most processes choose the
// same.
//
// Determinism. For one version, one kind of device and one queue the library's documentation promises the same bits in
// every run; sums that are split along k are added in a separate step, in order, from fp32 parts in the workspace
// (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE). The schemes that add in the output, or round parts to its dtype, are
// excluded.
#include "gemm_tuning.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "gemm_kernels.h"
#include "gemm_narrow.h"
#include "kernel.cuh"

namespace sg::cuda {
namespace {

using Algorithm = cublasLtMatmulAlgo_t;

constexpr size_t kFlushBytes = size_t{160} << 20;     // well over any last-level cache; some 40 us
constexpr size_t kMostTimingBytes = size_t{6} << 30;  // a larger product takes the library's first choice
constexpr float kTimingMilliseconds = 8.0f;           // about, for one problem
constexpr int kMostRounds = 7;
constexpr float kSameSpeed = 1.01f;
constexpr const char *kNarrow = "narrow";  // a tuning text's word for narrow_gemm
constexpr float kEarlierMilliseconds = 1e-3f;  // by which narrow_gemm begins before the kernel ahead has ended

// Products with one narrow side, as LoRA's: they are bound by memory, and the library's first guess is often not the
// best.
bool is_narrow(const GemmProblem &p) { return std::min({p.m, p.n, p.k}) <= 256; }

bool can_run_narrow(const GemmProblem &p) {
  return narrow_supports(p) && narrow_workspace_bytes(p) <= kLibraryWorkspace;
}

struct Preference {
  const CublasLt &library;
  cublasLtMatmulPreference_t handle = nullptr;
  cublasStatus_t status;

  explicit Preference(const CublasLt &l) : library(l), status(l.preference_create(&handle)) {}
  ~Preference() {
    if (handle != nullptr) library.preference_destroy(handle);
  }
  Preference(const Preference &) = delete;
  Preference &operator=(const Preference &) = delete;

  template <class Value>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    if (status == CUBLAS_STATUS_SUCCESS) status = library.preference_set(handle, attribute, &value, sizeof(value));
  }
};

std::vector<Algorithm> candidates(const CublasLt &library, const GemmProblem &p, const ProductDescriptors &descriptors,
                                  int64_t alignment, int most) {
  Preference preference(library);
  const auto aligned = [&](int32_t dtype, int64_t stride) {
    return static_cast<uint32_t>(std::max(element_bytes(dtype), std::min(alignment, row_alignment(dtype, stride))));
  };
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kLibraryWorkspace);
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                 static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned(p.ab_dtype, p.ldb));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned(p.ab_dtype, p.lda));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned(p.d_dtype, p.add_c ? p.ldc : p.ldd));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned(p.d_dtype, p.ldd));
  const bool told = descriptors.assume_bias(std::max(element_bytes(p.d_dtype), alignment));
  if (preference.status != CUBLAS_STATUS_SUCCESS || !told) return {};
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
  int found = 0;
  if (library.heuristic(library.handle, descriptors.product, descriptors.first, descriptors.second, descriptors.c,
                        descriptors.d, preference.handle, most, results.data(), &found) != CUBLAS_STATUS_SUCCESS) {
    return {};
  }
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found; ++i) {
    const auto &result = results[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kLibraryWorkspace) {
      algorithms.push_back(result.algo);
    }
  }
  return algorithms;
}

// Whether an algorithm that comes from elsewhere takes these operands.
bool can_run(const CublasLt &library, const ProductDescriptors &descriptors, const Algorithm &algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  return descriptors.assume_bias(16) &&
         library.check(library.handle, descriptors.product, descriptors.first, descriptors.second, descriptors.c,
                       descriptors.d, &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= kLibraryWorkspace;
}

// Products with a small result and a long k leave most of the device idle unless k is split. The library's list holds
// few such algorithms; these are its own, split otherwise.
void add_splits(const CublasLt &library, const GemmProblem &p, const ProductDescriptors &descriptors,
                std::vector<Algorithm> *algorithms) {
  constexpr size_t kBases = 4;
  constexpr int64_t kShortestPart = 128, kTile = 128;
  if (ceil_div(p.m, kTile) * ceil_div(p.n, kTile) >= device().units) return;
  const std::vector<Algorithm> bases(algorithms->begin(),
                                     algorithms->begin() + std::min<ptrdiff_t>(kBases, std::ssize(*algorithms)));
  for (const Algorithm &base : bases) {
    int32_t can_split = 0;
    uint32_t schemes = 0;
    size_t written = 0;
    if (library.capability(&base, CUBLASLT_ALGO_CAP_SPLITK_SUPPORT, &can_split, sizeof(can_split), &written) !=
            CUBLAS_STATUS_SUCCESS ||
        library.capability(&base, CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes), &written) !=
            CUBLAS_STATUS_SUCCESS ||
        can_split == 0 || (schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) == 0) {
      continue;
    }
    for (int32_t parts = 2; parts <= 32 && p.k / parts >= kShortestPart; parts *= 2) {
      Algorithm split = base;
      const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
      library.configure(&split, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts));
      library.configure(&split, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme));
      const bool known = std::any_of(algorithms->begin(), algorithms->end(),
                                     [&](const Algorithm &a) { return std::memcmp(&a, &split, sizeof(a)) == 0; });
      if (!known && can_run(library, descriptors, split)) algorithms->push_back(split);
    }
  }
}

size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Operands of one problem in memory of its own, a queue and events.
class Bench {
 public:
  Bench(const GemmProblem &problem, const ProductDescriptors &descriptors)
      : problem_(problem), descriptors_(descriptors) {}

  ~Bench() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (memory_ != nullptr) cudaFree(memory_);
    cudaGetLastError();  // a candidate that failed is told by being left out, and must not be met by the next launch
  }
  Bench(const Bench &) = delete;
  Bench &operator=(const Bench &) = delete;

  // False where the memory for it is not there.
  bool open(size_t num_candidates) {
    const GemmProblem &p = problem_;
    const int64_t a_count = (p.transpose_a ? p.k : p.m) * p.lda, b_count = (p.transpose_b ? p.n : p.k) * p.ldb;
    const int64_t d_count = p.m * std::max(p.ldd, p.add_c ? p.ldc : 0), bias_count = p.has_bias ? p.n : 0;
    const auto bytes = [](int64_t elements, int32_t dtype) {
      return static_cast<size_t>(elements * element_bytes(dtype));
    };
    const struct {
      void **start;
      size_t size;
    } parts[] = {{&a_, bytes(a_count, p.ab_dtype)}, {&b_, bytes(b_count, p.ab_dtype)},
                 {&d_, bytes(d_count, p.d_dtype)},  {&bias_, bytes(bias_count, p.d_dtype)},
                 {&workspace_, kLibraryWorkspace},  {&flush_, kFlushBytes}};
    size_t total = 0;
    for (const auto &part : parts) total += padded(part.size);
    if (total > kMostTimingBytes || cudaMalloc(&memory_, total) != cudaSuccess) return false;
    char *next = static_cast<char *>(memory_);
    for (const auto &part : parts) {
      *part.start = next;
      next += padded(part.size);
    }
    if (cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) return false;
    for (size_t i = 0; i < 2 * num_candidates; ++i) {
      cudaEvent_t event = nullptr;
      if (cudaEventCreate(&event) != cudaSuccess) return false;
      events_.push_back(event);
    }
    fill_random(a_, p.ab_dtype, a_count, 1, stream_);
    fill_random(b_, p.ab_dtype, b_count, 2, stream_);
    fill_random(d_, p.d_dtype, d_count, 3, stream_);
    fill_random(bias_, p.d_dtype, bias_count, 4, stream_);
    return cudaStreamSynchronize(stream_) == cudaSuccess;
  }

  bool run(const Choice &choice) {
    const float beta = problem_.add_c ? 1.0f : 0.0f;
    if (!choice.algorithm.has_value()) {
      narrow_gemm(problem_, 1.0f, a_, b_, beta, d_, d_, workspace_, stream_);
      return cudaGetLastError() == cudaSuccess;
    }
    return descriptors_.multiply(*choice.algorithm, 1.0f, a_, b_, beta, d_, d_, bias_, workspace_, stream_) ==
           CUBLAS_STATUS_SUCCESS;
  }

  bool finish() { return cudaStreamSynchronize(stream_) == cudaSuccess; }

  // Milliseconds of each candidate, run once one after the other; empty when something failed.
  std::vector<float> round(const std::vector<Choice> &choices) {
    for (size_t i = 0; i < choices.size(); ++i) {
      cudaMemsetAsync(flush_, static_cast<int>(i), kFlushBytes, stream_);
      cudaEventRecord(events_[2 * i], stream_);
      if (!run(choices[i])) return {};
      cudaEventRecord(events_[2 * i + 1], stream_);
    }
    if (!finish()) return {};
    std::vector<float> times(choices.size());
    for (size_t i = 0; i < choices.size(); ++i) {
      if (cudaEventElapsedTime(&times[i], events_[2 * i], events_[2 * i + 1]) != cudaSuccess) return {};
    }
    return times;
  }

 private:
  const GemmProblem &problem_;
  const ProductDescriptors &descriptors_;
  void *memory_ = nullptr, *a_ = nullptr, *b_ = nullptr, *d_ = nullptr, *bias_ = nullptr, *workspace_ = nullptr,
       *flush_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
};

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Leaves those candidates that are at most `slack` times as slow as the best, in their order; at least one.
void keep_fast(std::vector<Choice> *choices, const std::vector<float> &times, float slack) {
  const float best = *std::min_element(times.begin(), times.end());
  std::vector<Choice> kept;
  for (size_t i = 0; i < times.size(); ++i) {
    if (times[i] <= slack * best) kept.push_back((*choices)[i]);
  }
  *choices = kept;
}

Choice fastest(const GemmProblem &problem, const ProductDescriptors &descriptors, std::vector<Choice> choices) {
  const Choice first = choices.front();
  if (choices.size() == 1) return first;
  Bench bench(problem, descriptors);
  if (!bench.open(choices.size())) return first;
  std::erase_if(choices, [&](const Choice &choice) { return !bench.run(choice); });  // loads the kernels as well
  if (choices.empty() || !bench.finish()) return first;
  const std::vector<float> estimates = bench.round(choices);
  if (estimates.empty()) return first;
  keep_fast(&choices, estimates, 1.25f);
  const float round_milliseconds =
      static_cast<float>(choices.size()) * (*std::min_element(estimates.begin(), estimates.end()) + 0.05f);
  const int rounds = std::clamp(static_cast<int>(kTimingMilliseconds / round_milliseconds), 2, kMostRounds);
  std::vector<std::vector<float>> samples(choices.size());
  for (int r = 0; r < rounds && choices.size() > 1; ++r) {
    const std::vector<float> times = bench.round(choices);
    if (times.empty()) return first;
    for (size_t i = 0; i < times.size(); ++i) samples[i].push_back(times[i]);
  }
  if (choices.size() == 1) return choices.front();
  std::vector<float> medians;
  for (size_t i = 0; i < samples.size(); ++i) {
    medians.push_back(median(samples[i]) - (choices[i].algorithm.has_value() ? 0.0f : kEarlierMilliseconds));
  }
  keep_fast(&choices, medians, kSameSpeed);
  return choices.front();
}

// What makes a choice valid: the library's version, the device and the problem.
std::string tuning_prefix(const CublasLt &library, const std::string &key) {
  char text[96];
  std::snprintf(text, sizeof(text), "cublaslt %zu sm%d x%d ", library.version, device().architecture, device().units);
  return text + key + " ";
}

std::optional<Choice> read_tuning(const CublasLt &library, const GemmProblem &problem,
                                  const ProductDescriptors &descriptors, const char *text) {
  if (text == nullptr) return std::nullopt;
  const std::string prefix = tuning_prefix(library, problem_key(problem));
  if (std::strncmp(text, prefix.c_str(), prefix.size()) != 0) return std::nullopt;
  const char *hex = text + prefix.size();
  if (std::strcmp(hex, kNarrow) == 0) return can_run_narrow(problem) ? std::optional(Choice{}) : std::nullopt;
  if (std::strlen(hex) != 2 * sizeof(Algorithm)) return std::nullopt;
  std::array<unsigned char, sizeof(Algorithm)> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    unsigned value = 0;
    if (std::sscanf(hex + 2 * i, "%2x", &value) != 1) return std::nullopt;
    bytes[i] = static_cast<unsigned char>(value);
  }
  Algorithm algorithm;
  std::memcpy(&algorithm, bytes.data(), sizeof(algorithm));
  return can_run(library, descriptors, algorithm) ? std::optional(Choice{algorithm}) : std::nullopt;
}

std::mutex choices_lock;
std::map<std::string, Choice> choices;  // of this process, by key

}  // namespace

int64_t row_alignment(int32_t dtype, int64_t stride) {
  const int64_t bytes = stride * element_bytes(dtype);
  return std::min<int64_t>(16, bytes & -bytes);
}

std::string problem_key(const GemmProblem &p) {
  char text[160];
  std::snprintf(text, sizeof(text),
                "%" PRId64 "x%" PRId64 "x%" PRId64 "%s%s %d>%d by %" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "%s%s",
                p.m, p.n, p.k, p.transpose_a ? "a" : "", p.transpose_b ? "b" : "", p.ab_dtype, p.d_dtype,
                row_alignment(p.ab_dtype, p.lda), row_alignment(p.ab_dtype, p.ldb),
                p.add_c ? row_alignment(p.d_dtype, p.ldc) : 0, row_alignment(p.d_dtype, p.ldd), p.add_c ? "+c" : "",
                p.has_bias ? "+bias" : "");
  return text;
}

std::optional<Algorithm> first_algorithm(const CublasLt &library, const GemmProblem &problem,
                                         const ProductDescriptors &descriptors, int64_t alignment) {
  const std::vector<Algorithm> found = candidates(library, problem, descriptors, alignment, 1);
  return found.empty() ? std::nullopt : std::optional<Algorithm>(found.front());
}

std::optional<Choice> choose(const CublasLt &library, const GemmProblem &problem, const ProductDescriptors &descriptors,
                             const char *tuning) {
  const std::string key = problem_key(problem);
  const std::lock_guard<std::mutex> hold(choices_lock);
  if (const auto told = read_tuning(library, problem, descriptors, tuning)) {
    choices.emplace(key, *told);
    return told;
  }
  if (const auto known = choices.find(key); known != choices.end()) {
    const Choice &choice = known->second;
    const auto &algorithm = choice.algorithm;
    if (algorithm.has_value() ? can_run(library, descriptors, *algorithm) : can_run_narrow(problem)) return choice;
  }
  std::vector<Algorithm> listed = candidates(library, problem, descriptors, 16, is_narrow(problem) ? 16 : 8);
  add_splits(library, problem, descriptors, &listed);
  std::vector<Choice> found;
  if (can_run_narrow(problem)) found.push_back({});
  for (const Algorithm &algorithm : listed) found.push_back({algorithm});
  if (found.empty()) return std::nullopt;
  const Choice chosen = fastest(problem, descriptors, found);
  choices.emplace(key, chosen);
  return chosen;
}

std::string tuning_text(const CublasLt &library, const GemmProblem &problem, const Choice &choice) {
  std::string text = tuning_prefix(library, problem_key(problem));
  if (!choice.algorithm.has_value()) return text + kNarrow;
  std::array<unsigned char, sizeof(Algorithm)> bytes{};
  std::memcpy(bytes.data(), &*choice.algorithm, sizeof(Algorithm));
  for (const unsigned char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    text += digits;
  }
  return text;
}

}  // namespace sg::cuda
