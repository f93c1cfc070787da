// class Session and the functions that look at a program without running it.
#pragma once

#include <nanobind/nanobind.h>

#include "../engine/session.h"

namespace surogate::python {

void bind_session(nanobind::module_ &m);
Session &session_of(nanobind::handle object);  // the engine's, of an object of that class

}  // namespace surogate::python
