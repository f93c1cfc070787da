// class Session and the functions that look at a program without running it.
#pragma once

#include <nanobind/nanobind.h>

namespace surogate::python {

void bind_session(nanobind::module_ &m);

}  // namespace surogate::python
