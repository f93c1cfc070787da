// surogate_core._native: the engine as Python sees it. Thin: surogate_core/engine gives it its documented face.
#include <cpuid.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "chunks.h"
#include "convert.h"
#include "loader.h"
#include "registry.h"
#include "run_op.h"
#include "serving.h"
#include "serving_parts.h"
#include "session.h"

namespace surogate::python {
namespace {

constexpr const char *kTableCapsule = "surogate.kernel_library_v1";        // const sg_kernel_library *
constexpr const char *kFunctionCapsule = "surogate.kernel_library_fn_v1";  // sg_kernel_library_fn

void run_op_on(const std::string &op, nb::sequence inputs, nb::sequence outputs, nb::dict attrs,
               const std::string &backend, const std::string &kernel, int32_t threads) {
  const Operands in = read_operands(inputs, false, "input");
  const Operands out = read_operands(outputs, true, "output");
  const Attributes attributes = read_attributes(attrs);
  nb::gil_scoped_release release;
  run_op(op, in.tensors, out.tensors, attributes.attrs, backend, kernel, threads);
}

void register_library(nb::handle capsule, const std::string &origin) {
  PyObject *object = capsule.ptr();
  if (PyCapsule_IsValid(object, kTableCapsule)) {
    const void *table = PyCapsule_GetPointer(object, kTableCapsule);
    Registry::global().add(*static_cast<const sg_kernel_library *>(table), origin);
  } else if (PyCapsule_IsValid(object, kFunctionCapsule)) {
    void *function = PyCapsule_GetPointer(object, kFunctionCapsule);
    Registry::global().add(reinterpret_cast<sg_kernel_library_fn>(function), origin);
  } else {
    throw Error("kernel library of '" + origin + "': not a capsule that the engine knows",
                std::string("hand over a capsule named ") + kTableCapsule +
                    " (holding a const sg_kernel_library *) or " + kFunctionCapsule +
                    " (holding an sg_kernel_library_fn)");
  }
  // What the table points at must stay for the life of the process, and so must the module that holds it.
  capsule.inc_ref();
}

nb::list kernels() {
  nb::list result;
  for (const Kernel &kernel : Registry::global().kernels()) {
    nb::dict row;
    row["op"] = kernel.table.op;
    row["backend"] = kernel.table.backend;
    row["name"] = kernel.table.name;
    row["library"] = kernel.library;
    row["deterministic"] = (kernel.table.traits & SG_TRAIT_DETERMINISTIC) != 0;
    row["row_invariant"] = (kernel.table.traits & SG_TRAIT_ROW_INVARIANT) != 0;
    row["capturable"] = (kernel.table.traits & SG_TRAIT_CAPTURABLE) != 0;
    const bool in_place = (kernel.table.traits & SG_TRAIT_IN_PLACE) != 0;
    row["in_place_input"] = in_place ? nb::object(nb::int_(kernel.table.in_place_input)) : nb::none();
    result.append(row);
  }
  return result;
}

nb::list libraries() {
  nb::list result;
  for (const Library &library : Registry::global().libraries()) {
    nb::dict row;
    row["name"] = library.name;
    row["version"] = library.version;
    row["origin"] = library.origin;
    row["abi"] = std::to_string(library.abi_major) + "." + std::to_string(library.abi_minor);
    row["num_kernels"] = library.num_kernels;
    row["failure"] = library.failure.empty() ? nb::none() : nb::object(nb::str(library.failure.c_str()));
    result.append(row);
  }
  return result;
}

nb::dict cpu_features() {
  nb::dict result;
  __builtin_cpu_init();
#define SUROGATE_FEATURE(name) result[name] = __builtin_cpu_supports(name) != 0
  SUROGATE_FEATURE("avx2");
  SUROGATE_FEATURE("fma");
  SUROGATE_FEATURE("f16c");
  SUROGATE_FEATURE("avx512f");
  SUROGATE_FEATURE("avx512bw");
  SUROGATE_FEATURE("avx512dq");
  SUROGATE_FEATURE("avx512vl");
  SUROGATE_FEATURE("avx512vnni");
  SUROGATE_FEATURE("avx512bf16");
#undef SUROGATE_FEATURE
  unsigned a = 0, b = 0, c = 0, d = 0;  // gcc 12 has no name for AMX: leaf 7, EDX bits 22 (bf16) and 24 (tiles)
  result["amxbf16"] = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1u) && (d >> 24 & 1u);
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  register_error_translator();
  m.attr("ABI_MAJOR") = SG_ABI_MAJOR;
  m.attr("ABI_MINOR") = SG_ABI_MINOR;
  m.def("set_error_type", &set_error_type, nb::arg("type"));
  m.def("engine_directory", &engine_directory);
  m.def("load_kernel_library", &load_kernel_library, nb::arg("path"));
  m.def("register_library", &register_library, nb::arg("capsule"), nb::arg("origin"));
  m.def("kernels", &kernels);
  m.def("libraries", &libraries);
  m.def("cpu_features", &cpu_features);
  m.def("run_op", &run_op_on, nb::arg("op"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("attrs"),
        nb::arg("backend"), nb::arg("kernel"), nb::arg("threads"));
  bind_session(m);
  bind_serving_parts(m);
  bind_serving(m);
  bind_chunks(m);
}

}  // namespace surogate::python
