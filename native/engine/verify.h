// What must hold before a program may run.
#pragma once

#include "error.h"
#include "program.h"
#include "surogate/abi.h"

namespace surogate {

// Throws Error unless
//   - every storage lies within its arena and every tensor within its storage, aligned to its elements;
//   - no output has two elements in one place;
//   - within an entry nothing is read before it was written, unless it is external, persistent or a host's input;
//   - two storages that overlap in an arena are never live at the same time: a storage is live from its first to its
//     last use in an entry, a persistent one or a host's input always;
//   - every instruction runs on a stream in [0, num_streams), and waits only for instructions of its own entry;
//   - on several streams, what touches the same bytes runs in the program's order, unless both only read: the later one
//     comes after the earlier one on the same stream, or after one that waits for it, and so on. All streams are joined
//     where an entry begins and ends.
SUROGATE_API void verify(const Program &program, uint32_t num_streams);

// Throws Error if an output of the instruction overlaps an input, other than output 0 coinciding with the input that
// the kernel can work in place of, or another output.
SUROGATE_API void verify_overlap(const Program &program, size_t instruction, const sg_kernel &kernel);

}  // namespace surogate
