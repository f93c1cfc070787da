/* A backend for the tests of the engine, in plain C: two devices that are memory of this process, and whose streams are
 * as lazy as streams may be. Nothing runs before somebody waits for it, and then only what the wait needs; the streams of
 * a graph run as unevenly as its events allow. So work that is not ordered as it should be gives other numbers.
 * Its kernels are a few of its own, and those of the CPU backend, put on its streams. One thread at a time. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "surogate/abi.h"

#define GUARD 256
#define GUARD_BYTE 0xA5
#define DEVICE_BYTES ((uint64_t)1 << 33) /* what it says: nothing takes much of it */
#define NUM_DEVICES 2
#define MAX_OPERANDS 16
#define MAX_KERNELS 256

/* What tests look at, and what they switch. */
long fake_launches, fake_copies, fake_graph_launches, fake_graphs, fake_streams, fake_events, fake_blocks;
long fake_damaged, fake_failed; /* guards written to, or memory released twice; kernels that failed once they ran */
long fake_refuse_run; /* how many kernels from now on one refuses to be put on a stream; 0: none does */

static int32_t current_device;
static double ticks; /* of the devices' clock: one a kernel that ran */

static int32_t fail(char *error, size_t size, const char *message) {
  snprintf(error, size, "%s", message);
  return SG_ERROR;
}

/* ---- memory: a list of blocks, each between two guards */
struct block {
  struct block *next;
  char *data;
  uint64_t bytes;
  int32_t kind, device;
};
static struct block *blocks;

static struct block *block_of(const void *data, uint64_t bytes) {
  const char *at = data;
  for (struct block *b = blocks; b != NULL; b = b->next) {
    if (at >= b->data && at + bytes <= b->data + b->bytes) return b;
  }
  return NULL;
}

static uint64_t bytes_in_use(int32_t device) {
  uint64_t total = 0;
  for (struct block *b = blocks; b != NULL; b = b->next) {
    if (b->device == device && b->kind == SG_MEMORY_DEVICE) total += b->bytes;
  }
  return total;
}

/* ---- streams, events and graphs: queues of operations */
struct op;
struct event {
  long recorded, done; /* numbers of the last record put on a stream, and of the last one reached */
  struct stream *stream;
  long capture; /* of the last record: 0 outside of captures */
  long place;   /* of the last record in its capture */
  double time;
  int timed;
};
struct op {
  void (*run)(const struct op *op);
  sg_tensor operands[MAX_OPERANDS]; /* as they were when the kernel was put on the stream */
  const sg_call *call;
  void *to;
  const void *from;
  uint64_t bytes;
  int32_t byte;
  long number;          /* of a record; for waits: the one waited for */
  struct event *event;
  struct stream *stream; /* waits: where the event was recorded. In a graph: the op's own */
  struct graph *graph;
};
struct queue {
  struct op *ops;
  long count, capacity, head;
};
struct graph {
  struct queue queue;
  struct stream *origin;
  long id;
};
struct stream {
  struct queue queue;
  struct graph *capture;
  int joined; /* in a capture: the origin has waited for all that is on it */
  struct stream *next;
};
static struct stream *streams;
static long captures;
static int capturing; /* streams that are being captured */

static struct op *push(struct queue *queue, struct op op) {
  if (queue->count == queue->capacity) {
    queue->capacity = queue->capacity == 0 ? 16 : 2 * queue->capacity;
    queue->ops = realloc(queue->ops, (size_t)queue->capacity * sizeof(struct op));
  }
  queue->ops[queue->count] = op;
  return &queue->ops[queue->count++];
}

static void put(struct stream *stream, struct op op) {
  if (stream->capture == NULL) {
    push(&stream->queue, op);
    return;
  }
  op.stream = stream;
  stream->joined = 0;
  push(&stream->capture->queue, op);
}

static void pump(struct stream *stream, const struct event *event, long number);

static void run_record(const struct op *op) {
  if (op->event->done < op->number) op->event->done = op->number;
  op->event->time = ticks;
}
static void run_wait(const struct op *op) {
  if (op->event->done < op->number) pump(op->stream, op->event, op->number);
}
static void run_copy(const struct op *op) { memmove(op->to, op->from, op->bytes); }
static void run_clear(const struct op *op) { memset(op->to, op->byte, op->bytes); }

/* Runs what is on a stream, up to a record of an event if one is given. */
static void pump(struct stream *stream, const struct event *event, long number) {
  struct queue *queue = &stream->queue;
  while (queue->head < queue->count && !(event != NULL && event->done >= number)) {
    const struct op op = queue->ops[queue->head++];
    op.run(&op);
  }
  if (queue->head == queue->count) queue->head = queue->count = 0;
}

static void drain(void) {
  for (struct stream *stream = streams; stream != NULL; stream = stream->next) pump(stream, NULL, 0);
}

static int is_wait(const struct op *op) { return op->run == run_wait; }

/* Runs a graph: always the stream that was made last among those that may go on. `number` of a wait is the place of the
 * record in the graph. */
static void run_graph(const struct op *launch) {
  const struct queue *queue = &launch->graph->queue;
  char *done = calloc((size_t)queue->count + 1, 1);
  for (long left = queue->count; left > 0;) {
    const long before = left;
    for (struct stream *stream = streams; left == before && stream != NULL; stream = stream->next) {
      long i = 0;
      while (i < queue->count && (done[i] || queue->ops[i].stream != stream)) ++i;
      if (i == queue->count || (is_wait(&queue->ops[i]) && !done[queue->ops[i].number])) continue;
      if (!is_wait(&queue->ops[i])) queue->ops[i].run(&queue->ops[i]);
      done[i] = 1;
      --left;
    }
    if (left == before) abort(); /* streams that wait for each other */
  }
  free(done);
}

/* ---- the table */
static int32_t num_devices(int32_t *count, char *error, size_t size) {
  (void)error, (void)size;
  *count = NUM_DEVICES;
  return SG_OK;
}
static int32_t device_info(int32_t device, sg_device_info *info, char *error, size_t size) {
  (void)error, (void)size;
  snprintf(info->name, sizeof(info->name), "Fake %d", device);
  snprintf(info->versions, sizeof(info->versions), "driver 1.2, runtime 3");
  info->total_bytes = DEVICE_BYTES;
  info->free_bytes = DEVICE_BYTES - bytes_in_use(device);
  info->num_units = 3;
  info->architecture = 7;
  return SG_OK;
}
static int32_t activate(int32_t device, char *error, size_t size) {
  (void)error, (void)size;
  current_device = device;
  return SG_OK;
}

static int32_t allocate(uint64_t bytes, int32_t kind, void **data, char *error, size_t size) {
  if (capturing) return fail(error, size, "memory is allocated during a capture");
  if (kind == SG_MEMORY_DEVICE && bytes > DEVICE_BYTES - bytes_in_use(current_device)) {
    return fail(error, size, "out of memory");
  }
  struct block *b = malloc(sizeof(*b));
  char *memory = aligned_alloc(256, (bytes + 255) / 256 * 256 + 2 * GUARD);
  memset(memory, GUARD_BYTE, (bytes + 255) / 256 * 256 + 2 * GUARD); /* fresh memory of a device holds anything */
  *b = (struct block){blocks, memory + GUARD, bytes, kind, current_device};
  blocks = b;
  ++fake_blocks;
  *data = b->data;
  return SG_OK;
}
static void release(void *data, int32_t kind) {
  (void)kind;
  drain();
  for (struct block **at = &blocks; *at != NULL; at = &(*at)->next) {
    struct block *b = *at;
    if (b->data != data) continue;
    for (int i = 0; i < GUARD; ++i) {
      const uint8_t before = (uint8_t)b->data[-1 - i], after = (uint8_t)b->data[b->bytes + (uint64_t)i];
      if (before != GUARD_BYTE || after != GUARD_BYTE) ++fake_damaged;
    }
    *at = b->next;
    free(b->data - GUARD);
    free(b);
    --fake_blocks;
    return;
  }
  ++fake_damaged;
}

static int32_t stream_create(void **made, char *error, size_t size) {
  (void)error, (void)size;
  struct stream *stream = calloc(1, sizeof(*stream));
  stream->next = streams;
  streams = stream;
  ++fake_streams;
  *made = stream;
  return SG_OK;
}
static void stream_destroy(void *gone) {
  drain();
  struct stream **at = &streams;
  while (*at != gone) at = &(*at)->next;
  *at = (*at)->next;
  free(((struct stream *)gone)->queue.ops);
  free(gone);
  --fake_streams;
}
static int32_t stream_synchronize(void *stream, char *error, size_t size) {
  if (capturing) return fail(error, size, "the host waits for a device during a capture");
  pump(stream, NULL, 0);
  return SG_OK;
}

static int32_t copy(void *to, const void *from, uint64_t bytes, void *stream, char *error, size_t size) {
  const struct block *target = block_of(to, bytes), *source = block_of(from, bytes);
  if (target == NULL || source == NULL) return fail(error, size, "a copy of memory that is neither the device's nor pinned");
  ++fake_copies;
  put(stream, (struct op){.run = run_copy, .to = to, .from = from, .bytes = bytes});
  return SG_OK;
}
static int32_t clear(void *data, int32_t byte, uint64_t bytes, void *stream, char *error, size_t size) {
  if (block_of(data, bytes) == NULL) return fail(error, size, "memory to be cleared is not the device's");
  put(stream, (struct op){.run = run_clear, .to = data, .byte = byte, .bytes = bytes});
  return SG_OK;
}

static int32_t event_create(void **made, int32_t timed, char *error, size_t size) {
  (void)error, (void)size;
  struct event *event = calloc(1, sizeof(*event));
  event->timed = timed;
  ++fake_events;
  *made = event;
  return SG_OK;
}
static void event_destroy(void *event) {
  drain();
  free(event);
  --fake_events;
}
static int32_t event_record(void *object, void *on, int32_t external, char *error, size_t size) {
  (void)error, (void)size;
  struct event *event = object;
  struct stream *stream = on;
  const int inside = stream->capture != NULL && !external;
  const int joined = stream->joined;
  ++event->recorded;
  put(stream, (struct op){.run = run_record, .event = event, .number = event->recorded});
  if (inside) stream->joined = joined; /* a record is no work that somebody has to wait for */
  event->stream = stream;
  event->capture = inside ? stream->capture->id : 0;
  event->place = inside ? stream->capture->queue.count - 1 : 0;
  return SG_OK;
}
static int32_t event_wait(void *object, void *on, char *error, size_t size) {
  struct event *event = object;
  struct stream *stream = on;
  if (event->capture == 0) {
    if (stream->capture != NULL) return fail(error, size, "a captured stream waits for what was recorded outside");
    if (event->recorded > 0) {
      put(stream, (struct op){.run = run_wait, .event = event, .number = event->recorded, .stream = event->stream});
    }
    return SG_OK;
  }
  struct graph *graph = event->stream->capture;
  if (graph == NULL || graph->id != event->capture) {
    return fail(error, size, "the event is one of a capture that is over");
  }
  if (stream->capture == NULL) {
    stream->capture = graph;
    ++capturing;
  }
  const int joined = stream->joined;
  put(stream, (struct op){.run = run_wait, .event = event, .number = event->place});
  stream->joined = joined;
  if (stream == graph->origin) event->stream->joined = 1;
  return SG_OK;
}
static int32_t event_synchronize(void *object, char *error, size_t size) {
  struct event *event = object;
  if (capturing) return fail(error, size, "the host waits for an event during a capture");
  if (event->done < event->recorded) pump(event->stream, event, event->recorded);
  return SG_OK;
}
static int32_t event_seconds(void *begin, void *end, double *seconds, char *error, size_t size) {
  const struct event *first = begin, *last = end;
  if (!first->timed || !last->timed) return fail(error, size, "an event that keeps no time");
  if (first->done == 0 || last->done == 0) return fail(error, size, "an event that was not reached");
  *seconds = 1e-6 * (last->time - first->time);
  return SG_OK;
}

static int32_t capture_begin(void *on, char *error, size_t size) {
  struct stream *stream = on;
  if (capturing) return fail(error, size, "a capture is under way");
  stream->capture = calloc(1, sizeof(struct graph));
  stream->capture->origin = stream;
  stream->capture->id = ++captures;
  ++capturing;
  return SG_OK;
}
static void graph_destroy(void *object) {
  struct graph *graph = object;
  drain();
  free(graph->queue.ops);
  free(graph);
  --fake_graphs;
}
static int32_t capture_end(void *on, void **made, char *error, size_t size) {
  struct graph *graph = ((struct stream *)on)->capture;
  int unjoined = 0;
  *made = NULL;
  if (graph == NULL) return fail(error, size, "the stream is not captured");
  for (struct stream *stream = streams; stream != NULL; stream = stream->next) {
    if (stream->capture != graph) continue;
    if (stream != graph->origin && !stream->joined) unjoined = 1;
    stream->capture = NULL;
    --capturing;
  }
  ++fake_graphs;
  if (unjoined) {
    graph_destroy(graph);
    return fail(error, size, "a stream was not joined before the capture's end");
  }
  *made = graph;
  return SG_OK;
}
static int32_t graph_launch(void *graph, void *stream, char *error, size_t size) {
  (void)error, (void)size;
  ++fake_graph_launches;
  put(stream, (struct op){.run = run_graph, .graph = graph});
  return SG_OK;
}

static const sg_backend backend = {
    sizeof(sg_backend), "fake",         num_devices,    device_info,        activate,          allocate,
    release,            stream_create,  stream_destroy, stream_synchronize, copy,              clear,
    event_create,       event_destroy,  event_record,   event_wait,         event_synchronize, event_seconds,
    capture_begin,      capture_end,    graph_launch,   graph_destroy};

/* ---- kernels */
static int64_t count(const sg_tensor *t) {
  int64_t n = 1;
  for (int i = 0; i < t->rank; ++i) n *= t->shape[i];
  return n;
}

/* Puts `body` on the call's stream, with its operands, inputs first. */
static int32_t launch(const sg_call *call, void (*body)(const struct op *)) {
  struct op op = {.run = body, .call = call, .to = call->workspace};
  if (fake_refuse_run > 0 && --fake_refuse_run == 0) {
    return fail(call->error, call->error_size, "the device is out of order");
  }
  for (int i = 0; i < call->num_inputs + call->num_outputs; ++i) {
    op.operands[i] = i < call->num_inputs ? *call->inputs[i] : *call->outputs[i - call->num_inputs];
    if (op.operands[i].data == NULL) continue;
    const struct block *b = block_of(op.operands[i].data, 0);
    if (b == NULL || b->kind != SG_MEMORY_DEVICE || b->device != current_device) {
      return fail(call->error, call->error_size, "an operand is not in this device's memory");
    }
  }
  put(call->host->native_stream(call->stream), op);
  return SG_OK;
}

static int32_t supports(const sg_call *call) { return call->num_inputs + call->num_outputs <= MAX_OPERANDS ? 10 : 0; }

/* fake_add(a, b?) -> y */
static void add(const struct op *op) {
  const float *a = op->operands[0].data, *b = op->operands[1].data;
  float *y = op->operands[2].data;
  for (int64_t i = 0; i < count(&op->operands[2]); ++i) y[i] = a[i] + (b != NULL ? b[i] : 0.0f);
  ++fake_launches, ++ticks;
}
static int32_t run_add(const sg_call *call) { return launch(call, add); }

/* fake_scratch(x) -> y : a copy by way of the workspace */
static size_t scratch_bytes(const sg_call *call) { return sizeof(float) * (size_t)count(call->inputs[0]); }
static void scratch(const struct op *op) {
  const size_t bytes = sizeof(float) * (size_t)count(&op->operands[0]);
  memcpy(op->to, op->operands[0].data, bytes);
  memcpy(op->operands[1].data, op->to, bytes);
  ++fake_launches, ++ticks;
}
static int32_t run_scratch(const sg_call *call) {
  if (((uintptr_t)call->workspace & 255) != 0 || block_of(call->workspace, scratch_bytes(call)) == NULL) {
    return fail(call->error, call->error_size, "bad workspace");
  }
  return launch(call, scratch);
}

/* fake_tuned(x) -> y : a copy that says what it decided */
static int32_t prepare_tuned(const sg_call *call, void **state) {
  (void)call;
  *state = (void *)&backend;
  return SG_OK;
}
static void release_tuned(void *state) { (void)state; }
static int32_t tuning(const sg_call *call, char *text, size_t size) {
  (void)call;
  snprintf(text, size, "tile 3");
  return SG_OK;
}

#define TRAITS (SG_TRAIT_DETERMINISTIC | SG_TRAIT_CAPTURABLE)
static const sg_kernel add_kernel = {sizeof(sg_kernel), "fake_add", "fake", "plain", TRAITS | SG_TRAIT_IN_PLACE, 0,
                                     supports, NULL, NULL, NULL, run_add, NULL};
static const sg_kernel shy_kernel = {sizeof(sg_kernel), "fake_shy", "fake", "plain", SG_TRAIT_DETERMINISTIC, 0,
                                     supports, NULL, NULL, NULL, run_add, NULL};
static const sg_kernel scratch_kernel = {sizeof(sg_kernel), "fake_scratch", "fake", "plain", TRAITS, 0,
                                         supports, scratch_bytes, NULL, NULL, run_scratch, NULL};
static const sg_kernel tuned_kernel = {sizeof(sg_kernel), "fake_tuned", "fake", "plain", TRAITS, 0,
                                       supports, scratch_bytes, prepare_tuned, release_tuned, run_scratch, tuning};

/* ---- kernels of the CPU backend: for each op one that runs whichever of its kernels is the best */
const char *fake_cpu_library; /* its path */
static sg_kernel_library cpu;
static sg_kernel adopted[MAX_KERNELS];
static const sg_kernel *kernels[MAX_KERNELS] = {&add_kernel, &shy_kernel, &scratch_kernel, &tuned_kernel};
static int32_t num_kernels = 4;

struct adoption {
  const sg_kernel *kernel;
  void *state;
};

static const sg_kernel *best(const sg_call *call) {
  const sg_kernel *found = NULL;
  int32_t highest = 0;
  for (int32_t i = 0; i < cpu.num_kernels; ++i) {
    if (strcmp(cpu.kernels[i]->op, call->op) != 0) continue;
    const int32_t score = cpu.kernels[i]->supports(call);
    if (score > highest) found = cpu.kernels[i], highest = score;
  }
  return found;
}
static int32_t supports_adopted(const sg_call *call) { return best(call) != NULL && supports(call) ? 1 : 0; }
static size_t workspace_adopted(const sg_call *call) {
  const sg_kernel *kernel = best(call);
  return kernel->workspace != NULL ? kernel->workspace(call) : 0;
}
static int32_t prepare_adopted(const sg_call *call, void **state) {
  struct adoption *adoption = calloc(1, sizeof(*adoption));
  adoption->kernel = best(call);
  *state = adoption;
  return adoption->kernel->prepare != NULL ? adoption->kernel->prepare(call, &adoption->state) : SG_OK;
}
static void release_adopted(void *state) {
  struct adoption *adoption = state;
  if (adoption->state != NULL && adoption->kernel->release != NULL) adoption->kernel->release(adoption->state);
  free(adoption);
}
static void body_of_adopted(const struct op *op) {
  const struct adoption *adoption = op->call->state;
  const sg_tensor *operands[MAX_OPERANDS];
  char error[512] = "";
  sg_call call = *op->call;
  for (int i = 0; i < MAX_OPERANDS; ++i) operands[i] = &op->operands[i];
  call.inputs = operands;
  call.outputs = operands + call.num_inputs;
  call.state = adoption->state;
  call.error = error;
  call.error_size = sizeof(error);
  if (adoption->kernel->run(&call) != SG_OK) {
    fprintf(stderr, "fake device: %s: %s\n", call.op, error);
    ++fake_failed;
  }
  ++fake_launches, ++ticks;
}
static int32_t run_adopted(const sg_call *call) { return launch(call, body_of_adopted); }

static void adopt(const sg_kernel *kernel) {
  for (int32_t i = 4; i < num_kernels; ++i) {
    if (strcmp(kernels[i]->op, kernel->op) == 0) return;
  }
  adopted[num_kernels] = (sg_kernel){sizeof(sg_kernel), kernel->op, "fake", "borrowed", kernel->traits | TRAITS,
                                     kernel->in_place_input, supports_adopted, workspace_adopted, prepare_adopted,
                                     release_adopted, run_adopted, NULL};
  kernels[num_kernels] = &adopted[num_kernels];
  ++num_kernels;
}

int32_t fake_device(const sg_host *host, sg_kernel_library *library, char *error, size_t error_size) {
  void *file = dlopen(fake_cpu_library, RTLD_NOW);
  sg_kernel_library_fn fill = file != NULL ? (sg_kernel_library_fn)dlsym(file, SG_KERNEL_LIBRARY_SYMBOL) : NULL;
  if (fill == NULL) return fail(error, error_size, "no kernels of the CPU backend to borrow");
  if (fill(host, &cpu, error, error_size) != SG_OK) return SG_ERROR;
  for (int32_t i = 0; i < cpu.num_kernels && num_kernels < MAX_KERNELS; ++i) adopt(cpu.kernels[i]);
  *library = (sg_kernel_library){sizeof(sg_kernel_library), SG_ABI_MAJOR, SG_ABI_MINOR, "fake device", "1", num_kernels,
                                 kernels, &backend};
  return SG_OK;
}
