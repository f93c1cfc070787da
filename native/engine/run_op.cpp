#include "run_op.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"
#include "host.h"
#include "memory.h"
#include "registry.h"
#include "thread_pool.h"

namespace surogate {
namespace {

// Pools are kept: starting a thread costs more than most ops that are run this way. One op at a time uses them.
std::mutex run_mutex;

ThreadPool &shared_pool(int32_t threads) {
  static std::map<int32_t, std::unique_ptr<ThreadPool>> pools;
  std::unique_ptr<ThreadPool> &pool = pools[threads];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(threads);
  return *pool;
}

}  // namespace

void run_op(const std::string &op, std::span<const sg_tensor> inputs, std::span<const sg_tensor> outputs,
            std::span<const sg_attr> attrs, const std::string &backend, const std::string &kernel, int32_t threads) {
  std::vector<sg_attr> sorted(attrs.begin(), attrs.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const sg_attr &a, const sg_attr &b) { return std::strcmp(a.name, b.name) < 0; });
  std::vector<const sg_tensor *> input_pointers, output_pointers;
  for (const sg_tensor &tensor : inputs) input_pointers.push_back(&tensor);
  for (const sg_tensor &tensor : outputs) output_pointers.push_back(&tensor);

  std::lock_guard lock(run_mutex);
  sg_stream stream{&shared_pool(threads)};
  char message[kErrorSize] = "";
  sg_call call = make_call(op.c_str(), &stream, input_pointers, output_pointers, sorted, message);
  const Choice choice = Registry::global().select(call, backend, kernel);
  BoundKernel bound(choice.kernel, call);
  Memory workspace(bound.workspace_bytes(), "workspace of op '" + op + "'");
  call.workspace = workspace.data();
  call.workspace_size = bound.workspace_bytes();
  bound.prepare();
  bound.run();
}

}  // namespace surogate
