// Translates regular expressions of Python's `re` (CPython's Lib/re/_parser.py) to PCRE2. The translator
// keeps its own stack of groups, so nested groups cause no recursion of C++ functions.
#include "adapters/pattern_syntax.h"

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace shoestring::lora {
namespace {

constexpr int64_t kMostRepeats = 65535;  // maximum repeat count that PCRE2 supports
constexpr size_t kDeepest = 200;         // maximum nesting of groups; PCRE2's own limit is 250

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

class Translator {
 public:
  explicit Translator(const std::string& pattern) : in_(pattern) {}

  Translation run() {
    while (at_ < in_.size()) {
      const char c = in_[at_++];
      if (c == '\\') {
        escape();
      } else if (c == '[') {
        set();
      } else if (c == '(') {
        open();
      } else if (c == ')') {
        if (groups_.empty()) fail("unbalanced parenthesis");
        out_.text += ')';
        last_ = groups_.back() == Group::kPlain ? Last::kItem : Last::kAssertion;
        groups_.pop_back();
      } else if (c == '|') {
        if (in_look_behind()) fail("alternatives in a look-behind");
        out_.text += '|';
        last_ = Last::kNothing;
      } else if (c == '^' || c == '$') {
        out_.text += c;
        last_ = Last::kAssertion;
      } else if (c == '.') {
        out_.text += '.';
        last_ = Last::kItem;
      } else if (c == '*' || c == '+' || c == '?' || c == '{') {
        quantifier(c);
      } else {
        literal(c);
      }
    }
    if (!groups_.empty()) fail("missing )");
    if (out_.caseless && !ascii_) fail("(?i) with letters that are not ASCII");
    return std::move(out_);
  }

 private:
  enum class Group { kPlain, kAhead, kBehind };
  // Kind of the item before the cursor, which a following quantifier would repeat.
  enum class Last { kNothing, kAssertion, kItem, kRepeat };

  [[noreturn]] static void fail(const std::string& reason) { throw std::invalid_argument(reason); }
  bool in_look_behind() const { return !groups_.empty() && groups_.back() == Group::kBehind; }
  bool next(std::string_view text) {
    if (std::string_view(in_).substr(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }

  // Writes a literal character of the pattern. Bytes of a multi-byte UTF-8 character are copied, because
  // PCRE2 reads them as one character.
  void literal(char c) {
    if (static_cast<unsigned char>(c) >= 0x80) {
      ascii_ = false;
      out_.text += c;
    } else {
      code(static_cast<unsigned char>(c));
    }
    last_ = Last::kItem;
  }

  void code(uint32_t value) {
    ascii_ = ascii_ && value < 0x80;
    const char c = static_cast<char>(value);
    if (value < 0x80 && (is_letter(c) || is_digit(c) || c == '_')) {
      out_.text += c;
      return;
    }
    char text[16];
    std::snprintf(text, sizeof text, "\\x{%x}", value);
    out_.text += text;
  }

  uint32_t hexadecimal(int digits) {
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      const char c = at_ < in_.size() ? in_[at_] : ' ';
      if (!is_digit(c) && !(is_letter(c) && (c | 0x20) <= 'f')) fail("incomplete escape");
      value = value * 16 + static_cast<uint32_t>(is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return value;
  }

  // Reads an escape sequence after its backslash. Returns true and sets `value` to the character if the
  // escape means one character, both inside and outside of a set [...].
  bool character(uint32_t& value) {
    if (at_ == in_.size()) fail("bad escape at the end");
    const char c = in_[at_++];
    constexpr std::string_view kNames = "afnrtv", kCodes = "\a\f\n\r\t\v";
    if (const auto index = kNames.find(c); index != std::string_view::npos) {
      value = static_cast<unsigned char>(kCodes[index]);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      value = hexadecimal(c == 'x' ? 2 : c == 'u' ? 4 : 8);
    } else if (is_letter(c) || is_digit(c)) {
      --at_;
      return false;
    } else if (static_cast<unsigned char>(c) >= 0x80) {
      --at_;
      value = code_point();
    } else {
      value = static_cast<unsigned char>(c);
    }
    return true;
  }

  bool is_class(char c) const { return std::string_view("dDwWsS").find(c) != std::string_view::npos; }

  void escape() {
    uint32_t value = 0;
    if (character(value)) {
      code(value);
      last_ = Last::kItem;
      return;
    }
    const char c = in_[at_++];
    if (is_digit(c)) fail("backreferences and octal escapes");
    if (is_class(c) || c == 'b') {
      out_.classes = true;
      out_.text += {'\\', c};
    } else if (c == 'A' || c == 'Z') {
      out_.text += c == 'A' ? "\\A" : "\\z";
    } else {
      fail(std::string("the escape \\") + c);
    }
    last_ = is_class(c) ? Last::kItem : Last::kAssertion;
  }

  // Reads one UTF-8 character and returns its code point. Does not check for invalid bytes, because PCRE2
  // rejects them.
  uint32_t code_point() {
    const auto first = static_cast<unsigned char>(in_[at_++]);
    if (first < 0x80) return first;
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    uint32_t value = first & (0x3fu >> more);
    for (int i = 0; i < more && at_ < in_.size(); ++i)
      value = value << 6 | (static_cast<unsigned char>(in_[at_++]) & 0x3fu);
    return value;
  }

  // Reads one member of a character set [...]. For a single character, returns true and sets `value`. For a
  // class such as \d, writes the class and returns false.
  bool member(uint32_t& value) {
    if (at_ == in_.size()) fail("unterminated character set");
    if (in_[at_] != '\\') {
      value = code_point();
      return true;
    }
    ++at_;
    if (character(value)) return true;
    const char c = in_[at_++];
    if (c == 'b') {
      value = '\b';
      return true;
    }
    if (!is_class(c)) fail(std::string("the escape \\") + c + " in a set");
    out_.classes = true;
    out_.text += {'\\', c};
    return false;
  }

  void set() {
    out_.text += next("^") ? "[^" : "[";
    for (bool first = true; first || !next("]"); first = false) {
      uint32_t low = 0, high = 0;
      const bool one = member(low);
      const bool range = at_ + 1 < in_.size() && in_[at_] == '-' && in_[at_ + 1] != ']';
      if (range) {
        ++at_;
        if (!one || !member(high) || high < low) fail("bad character range");
      }
      if (one) code(low);
      if (range) {
        out_.text += '-';
        code(high);
      }
    }
    out_.text += ']';
    last_ = Last::kItem;
  }

  void open() {
    if (in_look_behind()) fail("groups in a look-behind");
    if (next("?#")) {
      const auto end = in_.find(')', at_);
      if (end == std::string::npos) fail("unterminated comment");
      // A comment in the pattern does not change last_, because a quantifier after the comment repeats the
      // item before it.
      at_ = end + 1;
      return;
    }
    Group group = Group::kPlain;
    out_.text += '(';
    if (next("?P<")) {
      out_.text += "?P<";
      const size_t begin = at_;
      while (at_ < in_.size() && (is_letter(in_[at_]) || is_digit(in_[at_]) || in_[at_] == '_'))
        out_.text += in_[at_++];
      if (at_ == begin || is_digit(in_[begin]) || !next(">")) fail("bad group name");
      out_.text += '>';
    } else if (next("?<=") || next("?<!")) {
      group = Group::kBehind;
      out_.text += in_.substr(at_ - 3, 3);
    } else if (next("?=") || next("?!")) {
      group = Group::kAhead;
      out_.text += in_.substr(at_ - 2, 2);
    } else if (next("?")) {
      const bool first = at_ == 2;
      const size_t begin = at_;
      while (at_ < in_.size() && std::string_view("is").find(in_[at_]) != std::string_view::npos) ++at_;
      const std::string flags = in_.substr(begin, at_ - begin);
      out_.caseless = out_.caseless || flags.find('i') != std::string::npos;
      out_.text += "?" + flags;
      if (first && !flags.empty() && next(")")) {
        out_.text += ')';
        return;
      }
      if (!next(":")) fail("this kind of group");
      out_.text += ':';
    }
    if (groups_.size() == kDeepest) fail("groups nested so deeply");
    groups_.push_back(group);
    last_ = Last::kNothing;
  }

  // Reads a decimal number at the cursor. Returns `otherwise` if there is no digit.
  int64_t number(int64_t otherwise) {
    if (at_ == in_.size() || !is_digit(in_[at_])) return otherwise;
    int64_t value = 0;
    for (; at_ < in_.size() && is_digit(in_[at_]); ++at_) {
      value = value * 10 + (in_[at_] - '0');
      if (value > kMostRepeats) fail("so many repetitions");
    }
    return value;
  }

  void quantifier(char c) {
    std::string text(1, c);
    if (c == '{') {
      const size_t begin = at_;
      const int64_t low = number(-1), high = next(",") ? number(-1) : low;
      // Python treats a brace that does not start a quantifier as a literal character.
      if (in_[begin] == '}' || !next("}")) {
        at_ = begin;
        return literal('{');
      }
      if (low >= 0 && high >= 0 && high < low) fail("min repeat greater than max repeat");
      text += std::to_string(low < 0 ? 0 : low) + "," + (high < 0 ? "" : std::to_string(high)) + "}";
    }
    if (last_ == Last::kNothing) fail("nothing to repeat");
    if (last_ == Last::kRepeat) fail("multiple repeat");
    if (last_ == Last::kAssertion) fail("repeated assertions");
    if (in_look_behind()) fail("quantifiers in a look-behind");
    if (next("?")) text += '?';
    if (at_ < in_.size() && in_[at_] == '+') fail("possessive quantifiers");
    out_.text += text;
    last_ = Last::kRepeat;
  }

  const std::string& in_;
  size_t at_ = 0;
  Translation out_;
  std::vector<Group> groups_;
  Last last_ = Last::kNothing;
  bool ascii_ = true;
};

}  // namespace

Translation translate_pattern(const std::string& pattern) { return Translator(pattern).run(); }

}  // namespace shoestring::lora
