#pragma once

// Includes Catch2, whose header has different names in version 2 (Debian 12) and version 3.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
