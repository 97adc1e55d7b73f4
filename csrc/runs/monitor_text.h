#pragma once

// Formats numbers for the report of a monitor.

#include <cstdint>
#include <string>

namespace shoestring::runs {

/// Returns a share, such as 0.61, as "61 %".
std::string percent(double share);
/// Returns a number with three digits, or all digits of its integer part.
std::string number(double value);
/// Returns bytes in GiB, with the digits of number().
std::string gibibytes(double bytes);
/// Returns a count with its noun, such as "1 core".
std::string count(int64_t value, const char* one, const char* several);

}  // namespace shoestring::runs
