#pragma once

// LibTorch's logging defines a CHECK of its own, which counts nothing. It comes first, and then makes way for
// Catch's.
#include <c10/util/Logging.h>
#undef CHECK

#include "catch2.h"
