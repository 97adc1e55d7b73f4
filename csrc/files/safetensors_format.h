#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

namespace shoestring::files {

struct DType {
  const char* name;
  at::ScalarType type;
};

// Dtypes of the safetensors format, in the order in which tensors are written to a file. Wide dtypes come
// first, so that the data of every tensor is aligned.
inline constexpr DType kDTypes[] = {
    {"U64", at::kUInt64},
    {"I64", at::kLong},
    {"F64", at::kDouble},
    {"C64", at::kComplexFloat},
    {"F32", at::kFloat},
    {"U32", at::kUInt32},
    {"I32", at::kInt},
    {"BF16", at::kBFloat16},
    {"F16", at::kHalf},
    {"U16", at::kUInt16},
    {"I16", at::kShort},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
};

// maximum size of a header in bytes; the limit of the safetensors format
inline constexpr int64_t kMaxHeader = 100'000'000;
// maximum number of dimensions of a tensor in a file, more than real tensors have
inline constexpr size_t kMaxDims = 64;

/// Quotes text that was read from a file, for an error message. The result is one line, cut after 120 bytes.
/// Characters that a terminal acts on or does not show are escaped, such as those that change the direction
/// of text.
std::string quote(std::string_view text);

/// Returns whether a terminal shows every character of a text in UTF-8 and acts on none.
bool is_visible(std::string_view text);

}  // namespace shoestring::files
