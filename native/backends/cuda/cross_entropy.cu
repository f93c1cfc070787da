// linear_cross_entropy and its gradient. With z = logit_scale * x weight^T, and l = softcap * tanh(z / softcap) if
// softcap > 0, else l = z, for each token with a target >= 0 (others have loss and dz 0):
//   token_loss = log sum_v exp(l_v) - l_target
//   dz_v = dtoken_loss (exp(l_v) / sum - [v == target]) (1 - (l_v / softcap)^2)
//   dx = logit_scale dz weight,   dweight += logit_scale dz^T x
// A target outside the vocabulary makes the loss and dz of its token NaN.
//
// Logits exist for one chunk of tokens at a time, in fp32: rounded to bf16 they spoil the third digit of the loss. For
// each chunk: a product, one kernel, and one or two products of what that kernel left. It gives a block to each row,
// which reads the row once for its largest logit and the sum of exponentials, and once more to write dz over it, in x's
// dtype (so a bf16 row ends up in the first half of its fp32 one). What shared memory holds of a row (45 % of 128256 on
// Hopper) is kept there for the second time; the rest of all rows at work is about what L2 holds.
//
// Floor for T 4096, K 4096, V 128256: three products of 4.3 TFLOP, 18.7 ms at 690 TFLOP/s; 0.7 ms for 2.1 GB of logits
// read once and 1.05 GB of dz written. With weight gradients, 16.8 GB for adding four chunks into 2.1 GB of dweight run
// under the third product.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "convert_rows.h"
#include "dequantize.h"
#include "gemm.h"
#include "kernel.cuh"

namespace sg::cuda {
namespace {

// ---- the kernel of a chunk

constexpr int kThreads = 1024, kPack = 4, kSlice = kThreads * kPack;  // a slice: a pack of each thread
constexpr int kUnroll = 4;                                            // slices at a time

struct RowArguments {
  float *logits;  // [rows, stride], and dz
  int64_t stride;
  int vocabulary;
  int kept_slices;            // of each row, in shared memory
  const int32_t *targets;     // of the chunk's rows, as what follows
  const float *dtoken_loss;   // null: only losses
  float *token_loss;
  float softcap;
};

// e^x; 0 where that is subnormal.
__device__ inline float exponential(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504088896341f));
  return result;
}

template <bool capped>
__device__ inline float capped_logit(float z, float softcap) {
  return capped ? softcap * tanhf(z / softcap) : z;
}

__device__ inline int pack_start(int slice) { return slice * kSlice + static_cast<int>(threadIdx.x) * kPack; }

// The pack of a row at `first`, which may reach past the vocabulary: rows are padded to whole packs.
__device__ inline void read_pack(const float *row, int first, int vocabulary, float (&z)[kPack]) {
  if (first < vocabulary) load(row + first, z);
}

// Logits of what `read_pack` gave; -infinity past the vocabulary.
template <bool capped>
__device__ inline void finish_pack(int first, const RowArguments &a, float (&z)[kPack]) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) z[j] = capped_logit<capped>(z[j], a.softcap);
  if (first + kPack > a.vocabulary) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) z[j] = first + j < a.vocabulary ? z[j] : -INFINITY;
  }
}

// The largest logit, and the sum of exponentials of what logits are below it.
struct Softmax {
  float largest, sum;

  __device__ void add(const float (&logits)[kUnroll][kPack]) {
    float most = largest;
#pragma unroll
    for (int i = 0; i < kUnroll * kPack; ++i) most = fmaxf(most, logits[i / kPack][i % kPack]);
    if (most == -INFINITY) return;  // nothing yet, and nothing here: a thread past the end of the row
    float more = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnroll * kPack; ++i) more += exponential(logits[i / kPack][i % kPack] - most);
    sum = sum * exponential(largest - most) + more;
    largest = most;
  }

  // Of 32 lanes, in every lane.
  __device__ Softmax over_warp() const {
    const float most = warp_max(largest);
    return {most, warp_sum(most == -INFINITY ? 0.0f : sum * exponential(largest - most))};
  }
};

__device__ Softmax over_block(const Softmax &mine) {
  __shared__ float largest[kThreads / 32], sums[kThreads / 32];
  const Softmax warp = mine.over_warp();
  if (threadIdx.x % 32 == 0) {
    largest[threadIdx.x / 32] = warp.largest;
    sums[threadIdx.x / 32] = warp.sum;
  }
  __syncthreads();
  return Softmax{largest[threadIdx.x % 32], sums[threadIdx.x % 32]}.over_warp();
}

template <class Dz>
__device__ void clear_row(Dz *row, int vocabulary) {
  const float zeros[kPack] = {};
  for (int first = threadIdx.x * kPack; first < vocabulary; first += kSlice) store(row + first, zeros);
}

// dz over the row, slice after slice. A bf16 slice s lies on the fp32 slice s / 2. Nobody reads that again if it is
// kept; else every thread has read it when the barrier after this step's reads is behind.
template <class Dz, bool capped>
__device__ void write_gradient(const float *row, const float4 *kept, const RowArguments &a, const Softmax &softmax,
                               int target, float weight) {
  const float factor = weight / softmax.sum;
  Dz *out = reinterpret_cast<Dz *>(const_cast<float *>(row));
  const int slices = static_cast<int>(ceil_div(a.vocabulary, kSlice));
  for (int slice = 0; slice < slices; slice += kUnroll) {
    float values[kUnroll][kPack] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (slice + u < a.kept_slices) {
        const float4 four = kept[(slice + u) * kThreads + threadIdx.x];
        values[u][0] = four.x, values[u][1] = four.y, values[u][2] = four.z, values[u][3] = four.w;
      } else {
        read_pack(row, pack_start(slice + u), a.vocabulary, values[u]);
      }
    }
    if (sizeof(Dz) < sizeof(float) && (slice + kUnroll - 1) / 2 >= a.kept_slices) __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int first = pack_start(slice + u);
      if (first >= a.vocabulary) continue;
      finish_pack<capped>(first, a, values[u]);
      float dz[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) dz[j] = exponential(values[u][j] - softmax.largest) * factor;
      if (static_cast<unsigned>(target - first) < kPack) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) dz[j] -= first + j == target ? weight : 0.0f;
      }
      if (capped) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const float ratio = values[u][j] / a.softcap;
          dz[j] = first + j < a.vocabulary ? dz[j] * (1.0f - ratio * ratio) : 0.0f;
        }
      }
      store(out + first, dz);
    }
  }
}

template <class Dz, bool capped>
__global__ void __launch_bounds__(kThreads, 1) cross_entropy_rows(const RowArguments a) {
  extern __shared__ float4 kept[];
  const int target = a.targets[blockIdx.x];
  float *row = a.logits + blockIdx.x * a.stride;
  if (target < 0) {
    if (threadIdx.x == 0) a.token_loss[blockIdx.x] = 0.0f;
    if (a.dtoken_loss != nullptr) clear_row(reinterpret_cast<Dz *>(row), a.vocabulary);
    return;
  }
  const bool valid = target < a.vocabulary;
  const float target_logit = valid ? capped_logit<capped>(row[target], a.softcap) : NAN;

  Softmax mine{-INFINITY, 0.0f};
  const int slices = static_cast<int>(ceil_div(a.vocabulary, kSlice));
  for (int slice = 0; slice < slices; slice += kUnroll) {
    float values[kUnroll][kPack] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      read_pack(row, pack_start(slice + u), a.vocabulary, values[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (slice + u < a.kept_slices) {
        kept[(slice + u) * kThreads + threadIdx.x] = {values[u][0], values[u][1], values[u][2], values[u][3]};
      }
      finish_pack<capped>(pack_start(slice + u), a, values[u]);
    }
    mine.add(values);
  }
  const Softmax softmax = over_block(mine);
  if (threadIdx.x == 0) a.token_loss[blockIdx.x] = softmax.largest - target_logit + logf(softmax.sum);
  if (a.dtoken_loss != nullptr) {
    write_gradient<Dz, capped>(row, kept, a, softmax, target, valid ? a.dtoken_loss[blockIdx.x] : NAN);
  }
}

constexpr int64_t kSliceBytes = kSlice * sizeof(float);

// Slices that fit into a block's shared memory beside what the kernel uses itself.
int64_t most_kept_slices() {
  constexpr int64_t reserved = 1024;
  return std::max<int64_t>(static_cast<int64_t>(device().shared_memory) - reserved, 0) / kSliceBytes;
}

template <class Dz, bool capped>
int32_t launch_rows(const sg_call *call, const RowArguments &arguments, int64_t rows) {
  const auto kernel = cross_entropy_rows<Dz, capped>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(most_kept_slices() * kSliceBytes));
  const size_t shared = static_cast<size_t>(arguments.kept_slices * kSliceBytes);
  if (error != cudaSuccess) return fail(call, "%s: CUDA: %s", call->op, cudaGetErrorString(error));
  kernel<<<static_cast<unsigned>(rows), kThreads, shared, stream(call)>>>(arguments);
  return launched(call);
}

// ---- the op

constexpr int64_t kLogitBytes = int64_t{512} << 20, kFewestTokens = 1024, kTokenUnit = 128;
constexpr int64_t kStrideUnit = 64;  // elements: rows of logits start at multiples of 256 bytes

constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

bool is_plain(int32_t dtype) { return dtype == SG_F32 || dtype == SG_BF16 || dtype == SG_F16; }
bool is_flat(const sg_tensor *t, int32_t dtype, int64_t count) {
  return t != nullptr && t->dtype == dtype && num_elements(t) == count;
}
bool is_matrix(const sg_tensor *t, int64_t rows, int64_t columns) {
  return t != nullptr && t->rank == 2 && t->shape[0] == rows && t->shape[1] == columns;
}

struct CrossEntropy {
  const sg_tensor *x, *weight, *targets, *dtoken_loss, *token_loss, *dx, *dweight;
  int64_t tokens, width, vocabulary;
  int64_t stride;        // of a row of logits, in fp32 elements
  int64_t chunk, chunks;  // tokens of a chunk; the last one may have fewer
  float softcap, logit_scale;
  bool gradient;

  bool read(const sg_call *call, bool gradient_) {
    gradient = gradient_;
    x = input(call, 0), weight = input(call, 1), targets = input(call, 2), token_loss = output(call, 0);
    dtoken_loss = gradient ? input(call, 3) : nullptr;
    dx = gradient ? output(call, 1) : nullptr, dweight = gradient ? output(call, 2) : nullptr;
    if (x == nullptr || weight == nullptr || x->rank != 2 || weight->rank != 2 || !all_dense(call)) return false;
    if (!is_activation(x) || !(is_plain(weight->dtype) || is_quantised(weight->dtype))) return false;
    tokens = x->shape[0], width = x->shape[1], vocabulary = weight->shape[0];
    if (weight->shape[1] != width || width < 1 || vocabulary < 1 || vocabulary > (1 << 30)) return false;
    if (!is_flat(targets, SG_I32, tokens) || !is_flat(token_loss, SG_F32, tokens)) return false;
    if (gradient && (!is_flat(dtoken_loss, SG_F32, tokens) || !is_matrix(dx, tokens, width) || !is_activation(dx))) {
      return false;
    }
    if (dweight != nullptr && (dweight->dtype != SG_F32 || !is_matrix(dweight, vocabulary, width))) return false;
    softcap = static_cast<float>(attr_float(call, "softcap", 0.0));
    logit_scale = static_cast<float>(attr_float(call, "logit_scale", 1.0));
    cut();
    return true;
  }

  // Chunks of about equal length whose logits are within kLogitBytes, unless that makes products too thin.
  void cut() {
    stride = round_up(vocabulary, kStrideUnit);
    const int64_t most = std::max(kLogitBytes / (stride * 4) / kTokenUnit * kTokenUnit, kFewestTokens);
    const int64_t fewest_chunks = std::max<int64_t>(ceil_div(tokens, most), 1);
    chunk = std::min(tokens, round_up(ceil_div(tokens, fewest_chunks), kTokenUnit));
    chunks = chunk == 0 ? 0 : ceil_div(tokens, chunk);
  }
  int64_t rows_of(int64_t index) const { return std::min(chunk, tokens - index * chunk); }
  int64_t rest() const { return chunk == 0 ? 0 : tokens % chunk; }  // tokens of a last chunk that is shorter

  size_t logit_bytes() const { return static_cast<size_t>(chunk * stride) * 4; }
  size_t weight_bytes() const {  // of a copy in x's dtype
    if (weight->dtype == x->dtype) return 0;
    return static_cast<size_t>(round_up(vocabulary * width * (x->dtype == SG_F32 ? 4 : 2), 256));
  }
  int64_t dz_stride() const { return x->dtype == SG_F32 ? stride : 2 * stride; }

  // The products of a chunk of `rows` tokens.
  GemmProblem logits_product(int64_t rows) const {
    GemmProblem p;
    p.m = rows, p.n = vocabulary, p.k = width;
    p.transpose_b = true;
    p.ab_dtype = x->dtype, p.d_dtype = SG_F32;
    p.lda = width, p.ldb = width, p.ldc = p.ldd = stride;
    return p;
  }
  GemmProblem dx_product(int64_t rows) const {
    GemmProblem p;
    p.m = rows, p.n = width, p.k = vocabulary;
    p.ab_dtype = x->dtype, p.d_dtype = dx->dtype;
    p.lda = dz_stride(), p.ldb = width, p.ldc = p.ldd = width;
    return p;
  }
  GemmProblem dweight_product(int64_t rows) const {
    GemmProblem p;
    p.m = vocabulary, p.n = width, p.k = rows;
    p.transpose_a = true;
    p.ab_dtype = x->dtype, p.d_dtype = SG_F32;
    p.lda = dz_stride(), p.ldb = width, p.ldc = p.ldd = width;
    p.add_c = true;
    return p;
  }
};

// The products of a chunk, planned.
struct ChunkProducts {
  std::unique_ptr<Gemm> logits, dx, dweight;

  // False with a reason in *error. `tuning`: texts as `tuning_text` wrote them, of which *position are taken already.
  bool plan(const CrossEntropy &p, int64_t rows, const std::string &tuning, size_t *position, std::string *error) {
    const auto one = [&](const GemmProblem &problem, std::unique_ptr<Gemm> *gemm) {
      const size_t end = std::min(tuning.find(kSeparator, *position), tuning.size());
      const std::string text = tuning.substr(*position, end - *position);
      *position = std::min(end + 1, tuning.size());
      *gemm = Gemm::plan(problem, text.empty() ? nullptr : text.c_str(), error);
      return *gemm != nullptr;
    };
    return one(p.logits_product(rows), &logits) && (!p.gradient || one(p.dx_product(rows), &dx)) &&
           (p.dweight == nullptr || one(p.dweight_product(rows), &dweight));
  }
  std::string tuning_text() const {
    std::string text;
    for (const Gemm *gemm : {logits.get(), dx.get(), dweight.get()}) {
      if (gemm != nullptr) text += gemm->tuning() + kSeparator;
    }
    return text;
  }
  static constexpr char kSeparator = '|';
};

// Of whole chunks, and of a last one that is shorter.
struct State {
  ChunkProducts whole, last;
};

size_t products_bytes(const CrossEntropy &p) {
  size_t bytes = 0;
  for (int64_t rows : {p.chunk, p.rest()}) {
    if (rows == 0) continue;
    bytes = std::max(bytes, gemm_workspace_bytes(p.logits_product(rows)));
    if (p.gradient) bytes = std::max(bytes, gemm_workspace_bytes(p.dx_product(rows)));
    if (p.dweight != nullptr) bytes = std::max(bytes, gemm_workspace_bytes(p.dweight_product(rows)));
  }
  return static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 256));
}

template <bool gradient>
int32_t supports(const sg_call *call) {
  CrossEntropy p;
  return p.read(call, gradient) ? 20 : 0;
}

template <bool gradient>
size_t workspace(const sg_call *call) {
  CrossEntropy p;
  return p.read(call, gradient) && p.chunks > 0 ? p.logit_bytes() + p.weight_bytes() + products_bytes(p) : 0;
}

template <bool gradient>
int32_t prepare(const sg_call *call, void **state) {
  CrossEntropy p;
  if (!p.read(call, gradient)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  auto made = std::make_unique<State>();
  const std::string tuning = attr_string(call, "tuning", "");
  std::string error;
  size_t position = 0;
  if ((p.chunk > 0 && !made->whole.plan(p, p.chunk, tuning, &position, &error)) ||
      (p.rest() > 0 && !made->last.plan(p, p.rest(), tuning, &position, &error))) {
    return fail(call, "%s: %s", call->op, error.c_str());
  }
  *state = made.release();
  return SG_OK;
}

void release(void *state) { delete static_cast<State *>(state); }

int32_t tuning(const sg_call *call, char *text, size_t text_size) {
  const State *state = static_cast<const State *>(call->state);
  std::string choice = state->whole.tuning_text();
  // Where the shorter chunk's choice has no room it is measured again.
  if (const std::string more = state->last.tuning_text(); choice.size() + more.size() < text_size) choice += more;
  if (choice.size() >= text_size) return fail(call, "%s: %zu bytes hold no tuning text", call->op, text_size);
  choice.copy(text, choice.size());
  text[choice.size()] = '\0';
  return SG_OK;
}

// The weight in x's dtype: where it lies, or a copy at `to`.
const void *weight_in_dtype(const CrossEntropy &p, char *to, cudaStream_t queue) {
  const sg_tensor *w = p.weight;
  if (w->dtype == p.x->dtype) return w->data;
  if (is_plain(w->dtype)) {
    convert_rows(w->data, w->dtype, p.vocabulary, p.width, p.width, to, p.x->dtype, queue);
  } else if (p.x->dtype == SG_F32) {
    dequantize_rows(w->data, w->dtype, p.vocabulary, p.width, reinterpret_cast<float *>(to), queue);
  } else {
    dequantize_rows(w->data, w->dtype, p.vocabulary, p.width, reinterpret_cast<bf16 *>(to), queue);
  }
  return to;
}

int32_t run_rows(const sg_call *call, const CrossEntropy &p, float *logits, int64_t first, int64_t rows) {
  const int64_t slices = ceil_div(p.vocabulary, kSlice);
  const int kept = p.gradient ? static_cast<int>(std::min(most_kept_slices(), slices)) : 0;  // losses read logits once
  const RowArguments arguments{logits,
                               p.stride,
                               static_cast<int>(p.vocabulary),
                               kept,
                               data<const int32_t>(p.targets) + first,
                               p.gradient ? data<const float>(p.dtoken_loss) + first : nullptr,
                               data<float>(p.token_loss) + first,
                               p.softcap};
  int32_t status = SG_OK;
  with_type(p.x, [&]<class Dz>(Dz) {
    const auto launch = p.softcap > 0 ? launch_rows<Dz, true> : launch_rows<Dz, false>;
    status = launch(call, arguments, rows);
  });
  return status;
}

int32_t run_chunk(const sg_call *call, const CrossEntropy &p, const ChunkProducts &products, int64_t first,
                  int64_t rows, const void *weight, float *logits, void *free_space) {
  const int64_t element = p.x->dtype == SG_F32 ? 4 : 2;
  const char *x = data<const char>(p.x) + first * p.width * element;
  int32_t status = products.logits->run(call, p.logit_scale, x, weight, nullptr, logits, nullptr, free_space);
  if (status == SG_OK) status = run_rows(call, p, logits, first, rows);
  if (status == SG_OK && p.gradient) {
    char *dx = data<char>(p.dx) + first * p.width * (p.dx->dtype == SG_F32 ? 4 : 2);
    status = products.dx->run(call, p.logit_scale, logits, weight, nullptr, dx, nullptr, free_space);
  }
  if (status == SG_OK && p.dweight != nullptr) {
    void *dweight = p.dweight->data;
    status = products.dweight->run(call, p.logit_scale, logits, x, dweight, dweight, nullptr, free_space);
  }
  return status;
}

template <bool gradient>
int32_t run(const sg_call *call) {
  CrossEntropy p;
  if (!p.read(call, gradient)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.chunks == 0) return SG_OK;
  char *space = static_cast<char *>(call->workspace);
  float *logits = reinterpret_cast<float *>(space);
  const void *weight = weight_in_dtype(p, space + p.logit_bytes(), stream(call));
  void *free_space = space + p.logit_bytes() + p.weight_bytes();
  const State *state = static_cast<const State *>(call->state);
  int32_t status = launched(call);
  for (int64_t i = 0; i < p.chunks && status == SG_OK; ++i) {
    const int64_t rows = p.rows_of(i);
    const ChunkProducts &products = rows == p.chunk ? state->whole : state->last;
    status = run_chunk(call, p, products, i * p.chunk, rows, weight, logits, free_space);
  }
  return status;
}

template <bool gradient>
constexpr sg_kernel describe(const char *op) {
  sg_kernel k = describe_kernel(op, "cuda", -1, supports<gradient>, workspace<gradient>, run<gradient>);
  k.prepare = prepare<gradient>;
  k.release = release;
  k.tuning = tuning;
  return k;
}

constexpr sg_kernel loss = describe<false>("linear_cross_entropy");
constexpr sg_kernel loss_and_gradient = describe<true>("linear_cross_entropy_grad");
SG_REGISTER_KERNEL(loss);
SG_REGISTER_KERNEL(loss_and_gradient);

}  // namespace
}  // namespace sg::cuda
