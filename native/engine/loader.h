// Kernel libraries are files opened at run time: a backend whose driver or processor is missing is a reason in a
// list, not a link error.
#pragma once

#include <string>

#include "error.h"

namespace surogate {

// Opens a kernel library and registers its kernels. Throws Error (and keeps the reason) if it cannot be opened, does
// not export sg_kernel_library_v1, or refuses to run here. A library stays open for the life of the process.
SUROGATE_API void load_kernel_library(const std::string &path);

// The folder of libsurogate_engine.so, where the engine's own backends lie.
SUROGATE_API std::string engine_directory();

}  // namespace surogate
