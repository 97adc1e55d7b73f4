#pragma once

// Catch2 2 (Debian 12) and 3 differ in the header's name.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
