#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoestring::lora {

/// PEFT's rules for comparing a pattern with a module's name. Each rule is equivalent to the call of Python's
/// `re` in its comment.
enum class PatternRule {
  kWhole,   // the whole name: re.fullmatch(pattern, name)
  kEnding,  // the end of the name: re.match("(.*\.)?(pattern)$", name)
  kInside,  // whole components in the name: re.match("(^|.*\.)pattern($|\..*)", name)
  kLayer,   // components before a layer number: re.match("(?:^|.*?\.)pattern\.(\d+)\.", name)
};

struct PatternMatch {
  int64_t index = -1;  // index of the first matching pattern in `patterns`, or -1 if none matches
  // Text that the first group of the rule's regular expression matched: with the rule kLayer, the layer
  // number, unless the pattern has groups. Empty under the other rules if the pattern was compared directly.
  std::string group;
};

/// Finds the first of `patterns` that matches `name`, with the same result as Python's `re`.
///
/// Patterns of the form "name", "^name" or ".*\.name" are compared directly; a dot matches any character, as
/// in `re`. PCRE2 matches every other pattern. One call has a limit of match steps for all patterns together.
/// PCRE2's recursion depth and memory are limited as well. A build without PCRE2 rejects every pattern that
/// cannot be compared directly.
///
/// Raises ValueError for a pattern that Python rejects, that exceeds a limit, or for which PCRE2 may differ
/// from Python:
/// - backreferences, conditions, atomic groups, possessive quantifiers, \B, octal escapes and \N;
/// - inline flags other than i and s;
/// - look-behind with alternatives, groups or quantifiers;
/// - \d, \w, \s, \b and (?i), if the name is not printable ASCII.
///
/// caller: the calling function, which begins the error message.
PatternMatch first_match(const std::string& caller, const std::vector<std::string>& patterns,
                         const std::string& name, PatternRule rule);

}  // namespace shoestring::lora
