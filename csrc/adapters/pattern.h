#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoestring::lora {

/// How a pattern meets a module's name, by PEFT's rules. Each is a call of Python's `re`.
enum class PatternRule {
  kWhole,   // re.fullmatch(pattern, name)
  kEnding,  // re.match("(.*\.)?(pattern)$", name)
  kInside,  // re.match("(^|.*\.)pattern($|\..*)", name)
  kLayer,   // re.match("(?:^|.*?\.)pattern\.(\d+)\.", name)
};

struct PatternMatch {
  int64_t index = -1;  // of the first pattern that matches; -1: none does
  std::string
      group;  // the text of the first group; empty for a pattern without metacharacters, but for kLayer
};

/// Finds the first of `patterns` that matches `name`, with the verdict of Python's `re`.
///
/// A name, "^name" and ".*\.name" are compared directly: a dot is any character, as in `re`. Every other
/// pattern runs in PCRE2, with one limit of steps for all patterns of a call, and limits of depth and memory.
/// Raises ValueError for a pattern that Python refuses, that exceeds a limit, or that PCRE2 might judge
/// otherwise than Python: backreferences, conditions, atomic groups, possessive quantifiers, \B, octal
/// escapes, \N, inline flags other than i and s, look-behind with alternatives, groups or quantifiers; \d,
/// \w, \s, \b and (?i) for a name that is not printable ASCII. A build without PCRE2 refuses every pattern
/// that it cannot compare directly.
///
/// caller: begins the message.
PatternMatch first_match(const std::string& caller, const std::vector<std::string>& patterns,
                         const std::string& name, PatternRule rule);

}  // namespace shoestring::lora
