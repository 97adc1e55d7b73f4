#pragma once

#include <string>

namespace shoestring::lora {

/// A regular expression of Python's `re` in PCRE2's syntax. The flags limit the names for which both engines
/// agree.
struct Translation {
  // The pattern for PCRE2 with PCRE2_UTF. Only "\n" is a newline.
  std::string text;
  // The pattern has \d, \w, \s or \b, which Python also applies to characters that are not ASCII.
  bool classes = false;
  // The pattern has (?i), for which Python and PCRE2 fold different letters.
  bool caseless = false;
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Translates a pattern. Raises std::invalid_argument, with the reason as its message, for a pattern that
/// Python refuses or that is not supported.
Translation translate_pattern(const std::string& pattern);

}  // namespace shoestring::lora
