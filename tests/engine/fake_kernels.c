/* A kernel library for the tests of the engine: plain C, as a stranger would write it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "surogate/abi.h"

static int64_t count(const sg_tensor *t) {
  int64_t n = 1;
  for (int i = 0; i < t->rank; ++i) n *= t->shape[i];
  return n;
}

static int64_t int_attr(const sg_call *call, const char *name) {
  for (int i = 0; i < call->num_attrs; ++i) {
    if (strcmp(call->attrs[i].name, name) == 0) return call->attrs[i].i;
  }
  return 0;
}

static int32_t supports_f32(const sg_call *call) {
  for (int i = 0; i < call->num_inputs; ++i) {
    if (call->inputs[i]->data != NULL && call->inputs[i]->dtype != SG_F32) return 0;
  }
  return 10;
}
static int32_t supports_low(const sg_call *call) { return supports_f32(call) ? 1 : 0; }
static int32_t supports_any(const sg_call *call) { (void)call; return 1; }

/* fake_add(a, b?) -> y */
static int32_t run_add(const sg_call *call) {
  const float *a = call->inputs[0]->data, *b = call->inputs[1]->data;
  float *y = call->outputs[0]->data;
  for (int64_t i = 0; i < count(call->outputs[0]); ++i) y[i] = a[i] + (b != NULL ? b[i] : 0.0f);
  return SG_OK;
}

/* fake_fail() : always fails */
static int32_t run_fail(const sg_call *call) {
  snprintf(call->error, call->error_size, "the moon is in the wrong phase");
  return SG_ERROR;
}

/* fake_tasks() -> y i32[n], inout : adds 1 to each element, one task an element, `repeat` times; `work` turns a task */
static void one_task(void *context, int64_t task, int32_t worker) {
  const sg_call *call = context;
  int32_t workers = call->host->num_workers(call->stream);
  volatile int64_t turns = int_attr(call, "work");
  while (turns > 0) turns = turns - 1;
  ((int32_t *)call->outputs[0]->data)[task] += (worker >= 0 && worker < workers) ? 1 : 1000000;
}
static int32_t run_tasks(const sg_call *call) {
  for (int64_t r = 0; r < int_attr(call, "repeat"); ++r) {
    call->host->parallel_for(call->stream, count(call->outputs[0]), one_task, (void *)call);
  }
  return SG_OK;
}

/* fake_scratch(x) -> y : a copy by way of the workspace */
static size_t scratch_bytes(const sg_call *call) { return sizeof(float) * (size_t)count(call->inputs[0]); }
static int32_t run_scratch(const sg_call *call) {
  if (call->workspace_size < scratch_bytes(call) || ((uintptr_t)call->workspace & 63) != 0) {
    snprintf(call->error, call->error_size, "bad workspace");
    return SG_ERROR;
  }
  memcpy(call->workspace, call->inputs[0]->data, scratch_bytes(call));
  memcpy(call->outputs[0]->data, call->workspace, scratch_bytes(call));
  return SG_OK;
}

/* fake_state() -> y : writes what prepare stored */
static int live_states = 0;
int fake_live_states(void) { return live_states; }
static int32_t prepare_state(const sg_call *call, void **state) {
  if (int_attr(call, "refuse")) {
    snprintf(call->error, call->error_size, "nothing to prepare with");
    return SG_ERROR;
  }
  *state = malloc(sizeof(float));
  *(float *)*state = 42.0f;
  ++live_states;
  return SG_OK;
}
static void release_state(void *state) {
  free(state);
  --live_states;
}
static int32_t run_state(const sg_call *call) {
  *(float *)call->outputs[0]->data = *(float *)call->state;
  return SG_OK;
}

/* fake_flags(x, x) -> y : y[i] = flags of input i */
static int32_t run_flags(const sg_call *call) {
  for (int32_t i = 0; i < call->num_inputs; ++i) ((float *)call->outputs[0]->data)[i] = (float)call->inputs[i]->flags;
  return SG_OK;
}

#define KERNEL(name, ...) static const sg_kernel name = {sizeof(sg_kernel), __VA_ARGS__}
KERNEL(add_kernel, "fake_add", "cpu", "plain", SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE, 0, supports_f32, NULL, NULL,
       NULL, run_add);
KERNEL(low_kernel, "fake_add", "cpu", "low", 0, 0, supports_low, NULL, NULL, NULL, run_add);
KERNEL(fail_kernel, "fake_fail", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, run_fail);
KERNEL(tasks_kernel, "fake_tasks", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, run_tasks);
KERNEL(scratch_kernel, "fake_scratch", "cpu", "plain", 0, 0, supports_f32, scratch_bytes, NULL, NULL,
       run_scratch);
KERNEL(state_kernel, "fake_state", "cpu", "plain", 0, 0, supports_any, NULL, prepare_state,
       release_state, run_state);
KERNEL(flags_kernel, "fake_flags", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, run_flags);
static const sg_kernel *const good[] = {&add_kernel,     &low_kernel,   &fail_kernel, &tasks_kernel,
                                        &scratch_kernel, &state_kernel, &flags_kernel};

/* Tables that the engine must refuse, and one that is newer than it. */
KERNEL(no_run, "fake_no_run", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, NULL);
static const sg_kernel *const incomplete[] = {&no_run};
KERNEL(same_name, "fake_add", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, run_add);
KERNEL(fresh_name, "fake_never", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, run_add);
static const sg_kernel *const duplicate[] = {&fresh_name, &same_name};
struct newer_kernel { sg_kernel known; void *appended; };
static const struct newer_kernel newer = {
    {sizeof(struct newer_kernel), "fake_newer", "cpu", "plain", 0, 0, supports_any, NULL, NULL, NULL, run_add},
    (void *)1};
static const sg_kernel *const newers[] = {&newer.known};

#define TABLE(major, minor, name, kernels) \
  {sizeof(sg_kernel_library), major, minor, name, "1", (int32_t)(sizeof(kernels) / sizeof(kernels[0])), kernels}
static const sg_kernel_library tables[] = {
    TABLE(SG_ABI_MAJOR, SG_ABI_MINOR, "fake", good),
    TABLE(99, 7, "other_version", good),
    TABLE(SG_ABI_MAJOR, SG_ABI_MINOR, "incomplete", incomplete),
    TABLE(SG_ABI_MAJOR, SG_ABI_MINOR, "duplicate", duplicate),
    TABLE(SG_ABI_MAJOR, SG_ABI_MINOR + 1, "newer", newers),
};
const sg_kernel_library *fake_table(int which) { return &tables[which]; }

int32_t fake_refuses(const sg_host *host, sg_kernel_library *library, char *error, size_t error_size) {
  (void)host, (void)library;
  snprintf(error, error_size, "no such device");
  return SG_ERROR;
}

int32_t sg_kernel_library_v1(const sg_host *host, sg_kernel_library *library, char *error, size_t error_size) {
  (void)host, (void)error, (void)error_size;
  *library = tables[0];
  return SG_OK;
}
