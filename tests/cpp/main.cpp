#if !__has_include(<catch2/catch_all.hpp>)  // Catch2 3 has its own main function
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#endif
