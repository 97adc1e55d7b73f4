#include "adapters/pattern.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "adapters/pattern_syntax.h"
#include "files/safetensors_format.h"

#ifdef SHOESTRING_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

namespace shoestring::lora {
namespace {

using files::quote;

bool is_printable(char c) { return c >= ' ' && c <= '~'; }
bool is_control(char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; }

// A pattern for module names that can be matched without a regular expression engine. It consists of literal
// characters and ".", which matches any character. It may start with "^" or ".*\." and end with "$". Except
// for ".*\.", every part matches text of a fixed length.
class Plain {
 public:
  // Parses a pattern. Returns nullopt if the pattern needs a regular expression engine.
  static std::optional<Plain> read(std::string_view pattern) {
    Plain plain;
    if (!pattern.empty() && pattern.front() == '^') {
      plain.begins_ = true;
      pattern.remove_prefix(1);
    } else if (pattern.substr(0, 4) == ".*\\.") {
      plain.inner_ = true;
      pattern.remove_prefix(4);
    }
    if (!pattern.empty() && pattern.back() == '$' &&
        (pattern.size() == 1 || pattern[pattern.size() - 2] != '\\')) {
      plain.ends_ = true;
      pattern.remove_suffix(1);
    }
    for (size_t i = 0; i < pattern.size(); ++i) {
      const bool any = pattern[i] == '.';
      if (pattern[i] == '\\') {
        if (++i == pattern.size() || std::isalnum(static_cast<unsigned char>(pattern[i])))
          return std::nullopt;
      } else if (std::string_view("^$*+?{}[]|()").find(pattern[i]) != std::string_view::npos) {
        return std::nullopt;
      }
      if (is_control(pattern[i])) return std::nullopt;
      plain.any_ = plain.any_ || any;
      plain.elements_.emplace_back(any, pattern[i]);
    }
    return plain;
  }

  // Returns whether the pattern matches `name`; suits() must be true for this name. With the rule kLayer,
  // also stores the layer number in the name in `group`.
  bool matches(std::string_view name, PatternRule rule, std::string& group) const {
    const size_t size = elements_.size();
    if (rule == PatternRule::kWhole || rule == PatternRule::kEnding) {
      if (name.size() < size || !fits(name, name.size() - size)) return false;
      const size_t before = name.size() - size;
      if (inner_) return before > 0 && name[before - 1] == '.';
      return before == 0 || (rule == PatternRule::kEnding && !begins_ && name[before - 1] == '.');
    }
    for (size_t i = 0; i + size <= name.size(); ++i) {
      if ((i > 0 && name[i - 1] != '.') || !fits(name, i)) continue;
      size_t end = i + size;
      if (rule == PatternRule::kInside) {
        if (end == name.size() || name[end] == '.') return true;
        continue;
      }
      const size_t first = end + 1;
      for (end = first; end < name.size() && is_digit(name[end]); ++end) {
      }
      if (name.substr(first - 1, 1) != "." || end == first || name.substr(end, 1) != ".") continue;
      group = name.substr(first, end - first);
      return true;
    }
    return false;
  }

  // Returns whether comparing this pattern with `name` byte by byte gives the same result as Python's `re`.
  // Names with control characters may give another result. So may, under the rules kInside and kLayer,
  // patterns that start with "^" or ".*\." or end with "$". In a name with non-ASCII characters, "." may
  // match several bytes, and kLayer accepts non-ASCII digits.
  bool suits(std::string_view name, PatternRule rule) const {
    if (std::any_of(name.begin(), name.end(), is_control)) return false;
    const bool ascii = std::all_of(name.begin(), name.end(), is_printable);
    if (!ascii && (any_ || rule == PatternRule::kLayer)) return false;
    return rule == PatternRule::kWhole || rule == PatternRule::kEnding || !(begins_ || inner_ || ends_);
  }

 private:
  bool fits(std::string_view name, size_t begin) const {
    for (size_t i = 0; i < elements_.size(); ++i) {
      if (!elements_[i].first && elements_[i].second != name[begin + i]) return false;
    }
    return true;
  }

  // Whether the pattern starts with "^" (begins_) or with ".*\." (inner_), and whether it ends with "$"
  // (ends_).
  bool begins_ = false, inner_ = false, ends_ = false;
  bool any_ = false;
  // The characters of the pattern: (true, any value) for ".", and (false, c) for a literal character c.
  std::vector<std::pair<bool, char>> elements_;
};

#ifdef SHOESTRING_PCRE2

constexpr int64_t kSteps = 500'000;  // limit of PCRE2's match steps per call of first_match: about 40 ms
// Match steps allowed in the first attempt to match a pattern. Each further attempt allows ten times as many.
constexpr uint32_t kFirstSteps = 100;
constexpr uint32_t kDepth = 20'000;
constexpr uint32_t kHeap = 16 << 10;   // PCRE2's memory limit per match, in KiB
constexpr size_t kLongest = 16 << 10;  // maximum length of a pattern, in bytes
constexpr size_t kCached = 1024;       // maximum number of compiled patterns in a thread's cache

template <auto Function>
struct Free {
  template <class T>
  void operator()(T* pointer) const {
    Function(pointer);
  }
};
template <class T, auto Function>
using Owned = std::unique_ptr<T, Free<Function>>;
using Code = Owned<pcre2_code, pcre2_code_free>;

// A pattern of Python's `re`, compiled by PCRE2.
struct Compiled {
  explicit Compiled(const std::string& pattern) {
    if (pattern.size() > kLongest)
      throw std::invalid_argument("a pattern of " + std::to_string(pattern.size()) + " bytes");
    translation = translate_pattern(pattern);
    const Owned<pcre2_compile_context, pcre2_compile_context_free> context(
        pcre2_compile_context_create(nullptr));
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    int error = 0;
    size_t at = 0;
    const auto& text = translation.text;
    code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                             PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &error, &at, context.get()));
    if (code == nullptr) throw std::invalid_argument(message(error));
  }

  static std::string message(int error) {
    unsigned char text[256] = {};
    pcre2_get_error_message(error, text, sizeof text);
    return reinterpret_cast<const char*>(text);
  }

  Translation translation;
  Code code;
};

const Compiled& compiled(const std::string& pattern) {
  thread_local std::map<std::string, Compiled> cache;
  const auto cached = cache.find(pattern);
  if (cached != cache.end()) return cached->second;
  if (cache.size() >= kCached) cache.clear();
  return cache.emplace(pattern, Compiled(pattern)).first->second;
}

// Returns the regular expression that PEFT passes to Python's `re` for this pattern and rule.
std::string written(const std::string& pattern, PatternRule rule) {
  if (rule == PatternRule::kWhole) return pattern;
  if (rule == PatternRule::kEnding) return "(.*\\.)?(" + pattern + ")$";
  if (rule == PatternRule::kInside) return "(^|.*\\.)" + pattern + "($|\\..*)";
  return "(?:^|.*?\\.)" + pattern + "\\.(\\d+)\\.";
}

bool search(const std::string& pattern, const std::string& name, PatternRule rule, int64_t& steps,
            std::string& group) {
  const Compiled& regex = compiled(written(pattern, rule));
  if ((regex.translation.classes || regex.translation.caseless) &&
      !std::all_of(name.begin(), name.end(), is_printable)) {
    throw std::invalid_argument("\\d, \\w, \\s, \\b and (?i) for a name that is not printable ASCII, " +
                                quote(name));
  }
  const Owned<pcre2_match_context, pcre2_match_context_free> context(pcre2_match_context_create(nullptr));
  const Owned<pcre2_match_data, pcre2_match_data_free> data(
      pcre2_match_data_create_from_pattern(regex.code.get(), nullptr));
  pcre2_set_depth_limit(context.get(), kDepth);
  pcre2_set_heap_limit(context.get(), kHeap);
  const uint32_t options = PCRE2_ANCHORED | (rule == PatternRule::kWhole ? PCRE2_ENDANCHORED : 0);
  int result = PCRE2_ERROR_MATCHLIMIT;
  for (uint32_t limit = kFirstSteps; result == PCRE2_ERROR_MATCHLIMIT && steps > 0; limit *= 10) {
    pcre2_set_match_limit(context.get(), static_cast<uint32_t>(std::min<int64_t>(limit, steps)));
    steps -= limit;
    result = pcre2_match(regex.code.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0, options,
                         data.get(), context.get());
  }
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0) throw std::invalid_argument(Compiled::message(result));
  const size_t* spans = pcre2_get_ovector_pointer(data.get());
  if (result > 1 && spans[2] != PCRE2_UNSET) group = name.substr(spans[2], spans[3] - spans[2]);
  return true;
}

#else

bool search(const std::string& pattern, const std::string&, PatternRule, int64_t&, std::string&) {
  throw std::invalid_argument("regular expressions, since PCRE2 was not found when this library was built");
}
constexpr int64_t kSteps = 0;

#endif

}  // namespace

PatternMatch first_match(const std::string& caller, const std::vector<std::string>& patterns,
                         const std::string& name, PatternRule rule) {
  int64_t steps = kSteps;
  for (size_t i = 0; i < patterns.size(); ++i) {
    std::string group;
    const auto plain = Plain::read(patterns[i]);
    try {
      const bool direct = plain && plain->suits(name, rule);
      if (direct ? plain->matches(name, rule, group) : search(patterns[i], name, rule, steps, group)) {
        return {static_cast<int64_t>(i), group};
      }
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(
          false, caller,
          ": expected a name or a regular expression of Python's that runs within limits, received ",
          quote(patterns[i]), "; not supported: ", error.what());
    }
  }
  return {};
}

}  // namespace shoestring::lora
