#pragma once

// LibTorch's logging header defines its own CHECK, which Catch2 does not count. Include that header first and
// undefine its CHECK, so that Catch2's CHECK is the one that the tests use.
#include <c10/util/Logging.h>
#undef CHECK

#include "catch2.h"
