#pragma once

#include <string>

namespace shoestring::lora {

/// A regular expression of Python's `re`, translated to PCRE2's syntax. If `classes` or `caseless` is true,
/// Python and PCRE2 agree only for names in printable ASCII.
struct Translation {
  // Pattern to compile with the option PCRE2_UTF and with the line feed as the only newline.
  std::string text;
  // Whether the pattern has \d, \w, \s or \b, which in Python also apply to characters that are not ASCII.
  bool classes = false;
  // Whether the pattern has (?i). For letters outside of ASCII, Python and PCRE2 differ in which ones are
  // equal if case is ignored.
  bool caseless = false;
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Translates a regular expression of Python's `re` to PCRE2. Raises std::invalid_argument for a pattern that
/// Python rejects or that is not supported; the message is the reason.
Translation translate_pattern(const std::string& pattern);

}  // namespace shoestring::lora
