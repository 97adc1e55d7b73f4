#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/safetensors_format.h"

namespace shoestring::files {
namespace {

// Ranges of code points that a terminal acts on or does not show: control characters, marks of direction,
// separators of lines, and invisible characters. core/errors.py has the same.
constexpr std::pair<uint32_t, uint32_t> kHidden[] = {
    {0x0, 0x1f},      {0x7f, 0x9f},     {0xad, 0xad},       {0x61c, 0x61c},
    {0x180e, 0x180e}, {0x200b, 0x200f}, {0x2028, 0x202e},   {0x2060, 0x206f},
    {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe007f},
};

bool is_hidden(uint32_t code) {
  return std::any_of(std::begin(kHidden), std::end(kHidden),
                     [=](const auto& range) { return range.first <= code && code <= range.second; });
}

// Calls visit(code point, bytes) for each character of a text in UTF-8. A damaged character counts as one
// byte.
template <class Visit>
void for_each_character(std::string_view text, const Visit& visit) {
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    size_t size = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (size > text.size()) size = 1;
    uint32_t code = size == 1 ? first : first & (0x7f >> size);
    for (size_t i = 1; i < size; ++i) code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3f);
    visit(code, text.substr(0, size));
    text.remove_prefix(size);
  }
}

void append_escape(std::string& out, uint32_t code) {
  std::array<char, 16> escape{};
  std::snprintf(escape.data(), escape.size(), code < 0x10000 ? "\\u%04x" : "\\U%08x", code);
  out += escape.data();
}

}  // namespace

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 120;
  const bool cut = text.size() > kLongest;
  const nlohmann::json value = std::string(text.substr(0, kLongest));
  std::string out;
  for_each_character(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                     [&](uint32_t code, std::string_view bytes) {
                       if (is_hidden(code)) return append_escape(out, code);
                       out += bytes;
                     });
  return out + (cut ? "..." : "");
}

bool is_visible(std::string_view text) {
  bool visible = true;
  for_each_character(text, [&](uint32_t code, std::string_view) { visible &= !is_hidden(code); });
  return visible;
}

}  // namespace shoestring::files
