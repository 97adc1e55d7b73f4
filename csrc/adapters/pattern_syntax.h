#pragma once

#include <string>

namespace shoestring::lora {

/// A regular expression of Python's `re` in PCRE2's syntax, and what limits the names for which both agree.
struct Translation {
  std::string text;       // for PCRE2 with PCRE2_UTF, newlines being "\n" alone
  bool classes = false;   // \d, \w, \s or \b: Python knows more letters, digits and spaces than ASCII's
  bool caseless = false;  // Python folds other letters than PCRE2
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Raises std::invalid_argument, which says what is wrong, for a pattern that Python refuses or that is not
/// supported.
Translation translate_pattern(const std::string& pattern);

}  // namespace shoestring::lora
