#include "host.h"

#include "dtype.h"
#include "thread_pool.h"

namespace surogate {
namespace {

void parallel_for(sg_stream *stream, int64_t num_tasks, sg_task_fn body, void *context) {
  stream->pool->parallel_for(num_tasks, body, context);
}

int32_t num_workers(sg_stream *stream) { return stream->pool->num_workers(); }

void *native_stream(sg_stream *stream) { return stream->native; }

constexpr sg_host kHost = {sizeof(sg_host), SG_ABI_MAJOR, SG_ABI_MINOR, parallel_for,
                           num_workers,     dtype_info,   native_stream};

}  // namespace

const sg_host *host_table() { return &kHost; }

}  // namespace surogate
