/* The Surogate kernel ABI, version 1.3.
 *
 * A kernel library exports one function, sg_kernel_library_v1 (see the end of this file), or hands the engine a pointer
 * to the same table. Nothing but plain C crosses this boundary: no C++ type, no exception, no Python object.
 *
 * Versioning. Every struct begins with `struct_size`, set by whoever fills it to sizeof(the struct) as it was compiled.
 * A field may only be appended, or a trait added, which raises SG_ABI_MINOR; a reader treats a field past `struct_size` as
 * zero. Any other change raises SG_ABI_MAJOR, and the engine refuses a library of another major version, naming both numbers.
 *
 * Rules for a kernel's `run`:
 *   - it never allocates device memory, never synchronises a device, never throws and never calls exit or abort;
 *   - what it needs besides its operands is the workspace it asked for and the state it prepared;
 *   - the same call on the same bits gives the same bits, whatever the number of workers (trait SG_TRAIT_DETERMINISTIC);
 *   - it reads its inputs, writes every element of its outputs, and touches nothing else.
 */
#ifndef SUROGATE_ABI_H
#define SUROGATE_ABI_H

#include <stddef.h>
#include <stdint.h>

#define SG_ABI_MAJOR 1
#define SG_ABI_MINOR 3
#define SG_MAX_RANK 6

#ifdef __cplusplus
extern "C" {
#endif

/* Element types. Codes below 64 are one element each; codes from 64 are blocks of elements along the last axis, laid out
 * as in GGUF files. sg_host.dtype_info gives name, elements and bytes of a block. Codes are never reused. */
enum {
  SG_F32 = 1,
  SG_F16 = 2,
  SG_BF16 = 3,
  SG_F64 = 4,
  SG_I8 = 8,
  SG_U8 = 9,
  SG_I32 = 10,
  SG_I64 = 11,
  SG_Q4_0 = 64,
  SG_Q4_1 = 65,
  SG_Q5_0 = 66,
  SG_Q5_1 = 67,
  SG_Q8_0 = 68,
  SG_Q4_K = 69,
  SG_Q5_K = 70,
  SG_Q6_K = 71
};

typedef struct sg_dtype_info {
  size_t struct_size;
  const char *name;     /* "f32", "bf16", "q4_1", ... as in the program's text form */
  int64_t block_elems;  /* 1 for plain types */
  int64_t block_bytes;
} sg_dtype_info;

/* A tensor operand. `data == NULL` means that an optional operand is absent. Strides count elements; the last axis of a
 * block type is dense and its other strides are multiples of the block. DLPack carries the same facts for plain types. */
typedef struct sg_tensor {
  size_t struct_size;
  void *data;
  int32_t dtype;
  int32_t rank;
  int64_t shape[SG_MAX_RANK];
  int64_t strides[SG_MAX_RANK];
  uint32_t flags;     /* since 1.3: of SG_TENSOR_* */
  uint32_t reserved;  /* 0 */
} sg_tensor;

enum {
  SG_TENSOR_FIXED = 1u << 0 /* nothing writes it while programs run: a kernel may read it before those ahead have ended */
};

enum { SG_ATTR_INT = 1, SG_ATTR_FLOAT = 2, SG_ATTR_STRING = 3 };

/* One named attribute. A call's attributes are sorted by name (strcmp order). Booleans are integers 0 and 1. */
typedef struct sg_attr {
  size_t struct_size;
  const char *name;
  int32_t kind;
  int64_t i;
  double f;
  const char *s;
} sg_attr;

typedef struct sg_stream sg_stream; /* opaque: a queue of a device, or a share of the host's thread pool */

/* body(context, task, worker): run task number `task`, on worker number `worker` in [0, num_workers). */
typedef void (*sg_task_fn)(void *context, int64_t task, int32_t worker);

/* What the engine offers to kernels. */
typedef struct sg_host {
  size_t struct_size;
  uint32_t abi_major;
  uint32_t abi_minor;
  /* CPU streams. Runs tasks 0 .. num_tasks-1 and returns when all are done. Workers claim tasks one after another, so
   * which worker runs a task is not fixed: results must not depend on it. Not re-entrant from inside a task. */
  void (*parallel_for)(sg_stream *stream, int64_t num_tasks, sg_task_fn body, void *context);
  int32_t (*num_workers)(sg_stream *stream);
  /* NULL for an unknown code. */
  const sg_dtype_info *(*dtype_info)(int32_t dtype);
  /* Streams of a device backend: the backend's own queue (for CUDA, a cudaStream_t); NULL on the CPU. */
  void *(*native_stream)(sg_stream *stream);
} sg_host;

typedef struct sg_call {
  size_t struct_size;
  const sg_host *host;
  sg_stream *stream;
  const char *op;
  int32_t num_inputs;
  int32_t num_outputs;
  int32_t num_attrs;
  const sg_tensor *const *inputs;
  const sg_tensor *const *outputs;
  const sg_attr *attrs;
  void *workspace;       /* at least what `workspace` returned, 64-byte aligned (256 on devices); contents undefined at entry */
  size_t workspace_size;
  void *state;           /* what `prepare` stored, or NULL */
  char *error;           /* where a failing function writes what was wrong, and what to do; NUL-terminated */
  size_t error_size;
} sg_call;

enum { SG_OK = 0, SG_ERROR = 1 };

enum {
  SG_TRAIT_DETERMINISTIC = 1u << 0, /* same bits in, same bits out, for any number of workers */
  SG_TRAIT_CAPTURABLE = 1u << 1,    /* may be recorded in a device graph */
  SG_TRAIT_IN_PLACE = 1u << 2,      /* output 0 may share its storage with input `in_place_input` */
  SG_TRAIT_ROW_INVARIANT = 1u << 3  /* since 1.2: a token's bits do not depend on the other tokens of the call, nor on how many */
};

/* One kernel: a native function for (op, backend, dtypes).
 * In `supports`, `workspace` and `prepare` operands have shapes, strides and dtypes, but `data` may only be compared with
 * NULL (NULL = absent). `prepare` runs once per instruction when a program is bound, `release` when it is dropped. */
typedef struct sg_kernel {
  size_t struct_size;
  const char *op;
  const char *backend; /* "cpu", "cuda" */
  const char *name;    /* unique per (op, backend): "avx512", "onednn_bf16", ... shown by `surogate explain` */
  uint32_t traits;
  int32_t in_place_input;
  int32_t (*supports)(const sg_call *call); /* 0: cannot run this call; otherwise a score, the highest runs */
  size_t (*workspace)(const sg_call *call); /* bytes; may be NULL for none */
  int32_t (*prepare)(const sg_call *call, void **state); /* may be NULL */
  void (*release)(void *state);                          /* may be NULL if `prepare` is */
  int32_t (*run)(const sg_call *call);
  /* Since 1.1; may be NULL. Writes what `prepare` decided by measuring (an algorithm of a library, a tile shape) as a
   * short text. An instruction whose string attribute "tuning" holds such a text makes `prepare` take it instead of
   * measuring again, or measure all the same where the text is of another version or device. */
  int32_t (*tuning)(const sg_call *call, char *text, size_t text_size);
} sg_kernel;

/* ---- Devices, since 1.1. A library may bring one backend: memory, queues and graphs of a kind of device. The CPU needs
 * none. Every function returns SG_OK, or writes a reason into `error` and returns SG_ERROR. Streams, events and graphs are
 * the backend's own objects (for CUDA: cudaStream_t, cudaEvent_t, cudaGraphExec_t). */
typedef struct sg_device_info {
  size_t struct_size;
  char name[128];         /* "NVIDIA H200" */
  char versions[256];     /* driver and libraries, as one line */
  uint64_t total_bytes;
  uint64_t free_bytes;    /* now */
  int32_t num_units;      /* multiprocessors */
  int32_t architecture;   /* for CUDA: 10 * major + minor of the compute capability */
} sg_device_info;

enum { SG_MEMORY_DEVICE = 0, SG_MEMORY_PINNED = 1 }; /* pinned: of the host, for copies that do not block */

typedef struct sg_backend {
  size_t struct_size;
  const char *name; /* as in sg_kernel.backend */
  int32_t (*num_devices)(int32_t *count, char *error, size_t error_size);
  int32_t (*device_info)(int32_t device, sg_device_info *info, char *error, size_t error_size);
  int32_t (*activate)(int32_t device, char *error, size_t error_size); /* for the calling thread */
  int32_t (*allocate)(uint64_t bytes, int32_t kind, void **data, char *error, size_t error_size); /* 256-byte aligned */
  void (*release)(void *data, int32_t kind);
  int32_t (*stream_create)(void **stream, char *error, size_t error_size);
  void (*stream_destroy)(void *stream);
  int32_t (*stream_synchronize)(void *stream, char *error, size_t error_size);
  /* Either side may be of the device, pinned, or plain memory of the host; with plain memory the call may block. */
  int32_t (*copy)(void *to, const void *from, uint64_t bytes, void *stream, char *error, size_t error_size);
  int32_t (*clear)(void *data, int32_t byte, uint64_t bytes, void *stream, char *error, size_t error_size);
  int32_t (*event_create)(void **event, int32_t timed, char *error, size_t error_size);
  void (*event_destroy)(void *event);
  /* external: where the stream is being captured, the event is one that the caller looks at after a launch of the graph;
   * otherwise it only orders streams within the graph. */
  int32_t (*event_record)(void *event, void *stream, int32_t external, char *error, size_t error_size);
  int32_t (*event_wait)(void *event, void *stream, char *error, size_t error_size);  /* the stream waits, not the caller */
  int32_t (*event_synchronize)(void *event, char *error, size_t error_size);         /* the caller waits */
  int32_t (*event_seconds)(void *begin, void *end, double *seconds, char *error, size_t error_size);
  /* What is put on the stream in between is recorded, not run, with what other streams do that wait for its events. */
  int32_t (*capture_begin)(void *stream, char *error, size_t error_size);
  int32_t (*capture_end)(void *stream, void **graph, char *error, size_t error_size); /* *graph NULL on failure */
  int32_t (*graph_launch)(void *graph, void *stream, char *error, size_t error_size);
  void (*graph_destroy)(void *graph);
} sg_backend;

typedef struct sg_kernel_library {
  size_t struct_size;
  uint32_t abi_major; /* SG_ABI_MAJOR as compiled */
  uint32_t abi_minor;
  const char *name;
  const char *version;
  int32_t num_kernels;
  const sg_kernel *const *kernels; /* must stay valid for the life of the process */
  const sg_backend *backend;       /* since 1.1; NULL: the library brings kernels only. Valid for the life of the process */
} sg_kernel_library;

/* Exported by a kernel library under exactly this name. Fills *library and returns SG_OK, or writes a reason into `error`
 * (no device, missing driver, CPU too old) and returns SG_ERROR; the engine keeps the reason for `surogate doctor`. */
typedef int32_t (*sg_kernel_library_fn)(const sg_host *host, sg_kernel_library *library, char *error, size_t error_size);
#define SG_KERNEL_LIBRARY_SYMBOL "sg_kernel_library_v1"

#ifdef __cplusplus
}
#endif
#endif
