#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoestring::lora {

/// How a pattern is compared with a module's name, by PEFT's rules. Each rule is a call of Python's `re`.
enum class PatternRule {
  kWhole,   // re.fullmatch(pattern, name)
  kEnding,  // re.match("(.*\.)?(pattern)$", name)
  kInside,  // re.match("(^|.*\.)pattern($|\..*)", name)
  kLayer,   // re.match("(?:^|.*?\.)pattern\.(\d+)\.", name)
};

struct PatternMatch {
  int64_t index = -1;  // index in `patterns` of the first match, or -1
  std::string group;   // text of the pattern's group 1; empty for a plain name, except with kLayer
};

/// Finds the first of `patterns` that matches `name`, and decides as Python's `re` does.
///
/// Patterns of the form "name", "^name" or ".*\.name" are compared directly; a dot is any character, as in
/// `re`. PCRE2 runs every other pattern. All patterns of a call share one limit of steps, and depth and
/// memory are limited. A build without PCRE2 refuses every pattern that it cannot compare directly.
///
/// Raises ValueError for a pattern that Python refuses, that exceeds a limit, or that PCRE2 might decide
/// differently from Python. These are:
/// - backreferences, conditions, atomic groups, possessive quantifiers, \B, octal escapes and \N;
/// - inline flags other than i and s;
/// - look-behind with alternatives, groups or quantifiers;
/// - \d, \w, \s, \b and (?i), if the name is not printable ASCII.
///
/// caller: begins the error message.
PatternMatch first_match(const std::string& caller, const std::vector<std::string>& patterns,
                         const std::string& name, PatternRule rule);

}  // namespace shoestring::lora
