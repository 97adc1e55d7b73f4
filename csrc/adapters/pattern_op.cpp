// Registers the operator _match_patterns, through which Python calls first_match of adapters/pattern.h.
#include <torch/library.h>

#include <tuple>

#include "adapters/pattern.h"

namespace shoestring::lora {
namespace {

std::tuple<int64_t, std::string> match_patterns(const std::string& caller, std::vector<std::string> patterns,
                                                const std::string& name, int64_t rule) {
  TORCH_CHECK_VALUE(rule >= 0 && rule <= static_cast<int64_t>(PatternRule::kLayer),
                    "match_patterns: rule: expected 0 to 3, received ", rule);
  auto match = first_match(caller, patterns, name, static_cast<PatternRule>(rule));
  return {match.index, std::move(match.group)};
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("_match_patterns", match_patterns); }

}  // namespace
}  // namespace shoestring::lora
