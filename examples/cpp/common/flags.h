#pragma once

// A small command-line parser for the examples.

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>

/// An error that the user can correct. It is printed as one line, with exit code 2.
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A command-line option, and the member of the struct Options that it sets. A bool option takes no value.
template <class Options>
struct Flag {
  const char* name;
  std::variant<std::string Options::*, int64_t Options::*, double Options::*, bool Options::*> member;
  double least;  // minimum value of a numeric option
  bool decides;  // whether the option affects the result of training
  const char* help;
};

template <class T>
T parse_number(const char* name, double least, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool number =
      error == std::errc() && end == text.data() + text.size() && std::isfinite(double(value));
  if (!number || value < least) {
    char shown[32];
    std::snprintf(shown, sizeof shown, "%g", least);
    throw InputError("--" + std::string(name) + ": expected " +
                     (std::is_integral_v<T> ? "a whole number" : "a number") + ", at least " + shown +
                     ", received '" + text + "'");
  }
  return value;
}

template <class Options>
std::string shown(const Options& options, const Flag<Options>& flag) {
  if (const auto* s = std::get_if<std::string Options::*>(&flag.member)) return options.**s;
  if (const auto* i = std::get_if<int64_t Options::*>(&flag.member)) return std::to_string(options.**i);
  if (const auto* b = std::get_if<bool Options::*>(&flag.member)) return options.**b ? "yes" : "no";
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", options.*std::get<double Options::*>(flag.member));
  return text;
}

/// Parses the command line into `options`. Raises InputError. `--help` prints `about` and the options, and
/// ends the program.
template <class Options>
void parse_flags(int argc, char** argv, const char* about, std::span<const Flag<Options>> flags,
                 Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      std::printf("%s\n", about);
      for (const auto& flag : flags) {
        const std::string value = shown(Options(), flag);
        const bool show = !value.empty() && value != "no";
        std::printf("  --%-18s%s%s%s%s\n", flag.name, flag.help, show ? " (" : "", show ? value.c_str() : "",
                    show ? ")" : "");
      }
      std::exit(0);
    }
    const Flag<Options>* found = nullptr;
    for (const auto& flag : flags) {
      if (word == "--" + std::string(flag.name)) found = &flag;
    }
    if (!found) throw InputError("'" + word + "' is no option; see --help");
    if (const auto* flag = std::get_if<bool Options::*>(&found->member)) {
      options.** flag = true;
      continue;
    }
    if (i + 1 == argc) throw InputError(word + ": expected a value after it");
    const std::string text = argv[++i];
    if (const auto* s = std::get_if<std::string Options::*>(&found->member)) options.** s = text;
    if (const auto* n = std::get_if<int64_t Options::*>(&found->member)) {
      options.** n = parse_number<int64_t>(found->name, found->least, text);
    }
    if (const auto* d = std::get_if<double Options::*>(&found->member)) {
      options.** d = parse_number<double>(found->name, found->least, text);
    }
  }
}

/// Returns the values of all options that affect the result of training, by the option's name.
template <class Options>
std::map<std::string, std::string> deciding(const Options& options, std::span<const Flag<Options>> flags) {
  std::map<std::string, std::string> values;
  for (const auto& flag : flags) {
    if (flag.decides) values[flag.name] = shown(options, flag);
  }
  return values;
}
