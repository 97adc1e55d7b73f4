#pragma once

// LibTorch's logging defines a CHECK of its own, which counts nothing. It comes first, and then makes way for Catch's.
#include <c10/util/Logging.h>
#undef CHECK

// Catch2 2 (Debian 12) and 3 differ in the header's name.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
