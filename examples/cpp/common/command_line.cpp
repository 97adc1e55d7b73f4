#include "command_line.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "input_error.h"

struct CommandLine::Impl {
  CLI::App app;
  // The options that affect the result of training. Each function returns the present value as text.
  std::map<std::string, std::function<std::string()>> deciding;

  void decides(const char* name, Effect effect, std::function<std::string()> value) {
    if (effect == kDecides) deciding[name] = std::move(value);
  }
};

namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}
std::string number_text(int64_t value) { return std::to_string(value); }

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const auto& word : words) all += (all.empty() ? "" : " | ") + word;
  return all;
}

// Returns a check of a number from `least` to `most`. CLI11 prints what a check returns after the option's
// name.
template <class T>
CLI::Validator in_range(T least, T most) {
  const std::string expected = std::string("expected ") +
                               (std::is_integral_v<T> ? "a whole number" : "a number") + " from " +
                               number_text(least) + " to " + number_text(most) + ", got ";
  const auto check = [=](const std::string& text) {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool number = error == std::errc() && end == text.data() + text.size();
    return number && value >= least && value <= most ? std::string() : expected + text;
  };
  return {check, ""};
}

}  // namespace

CommandLine::CommandLine(const std::string& about) : impl_(std::make_unique<Impl>()) {
  impl_->app.description(about);
  // An option that is given twice has the last value.
  impl_->app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  impl_->app.get_formatter()->column_width(28);
}

CommandLine::~CommandLine() = default;

void CommandLine::add(const char* name, std::string& value, Effect effect, const std::string& help,
                      const std::vector<std::string>& choices) {
  const std::string text = choices.empty() ? help : joined(choices) + ": " + help;
  auto* option = impl_->app.add_option(std::string("--") + name, value, text)->type_name("");
  impl_->decides(name, effect, [&value] { return value; });
  if (choices.empty()) return;
  const auto check = [choices](const std::string& text) {
    const bool known = std::find(choices.begin(), choices.end(), text) != choices.end();
    return known ? std::string() : "expected " + joined(choices) + ", got " + text;
  };
  option->check(CLI::Validator(check, ""));
}

void CommandLine::add(const char* name, int64_t& value, int64_t least, int64_t most, Effect effect,
                      const std::string& help) {
  impl_->app.add_option(std::string("--") + name, value, help)->type_name("")->check(in_range(least, most));
  impl_->decides(name, effect, [&value] { return number_text(value); });
}

void CommandLine::add(const char* name, double& value, double least, double most, Effect effect,
                      const std::string& help) {
  impl_->app.add_option(std::string("--") + name, value, help)->type_name("")->check(in_range(least, most));
  impl_->decides(name, effect, [&value] { return number_text(value); });
}

void CommandLine::add(const char* name, bool& value, Effect effect, const std::string& help) {
  impl_->app.add_flag(std::string("--") + name, value, help);
  impl_->decides(name, effect, [&value] { return std::string(value ? "yes" : "no"); });
}

void CommandLine::parse(int argc, const char* const* argv) {
  try {
    impl_->app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(impl_->app.help().c_str(), stdout);
    std::exit(0);
  } catch (const CLI::ExtrasError&) {
    throw InputError("'" + impl_->app.remaining().front() + "' is no option; see --help");
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string message = error.what();
    throw InputError(message.substr(0, message.find(':')) + ": expected a value after it, got none");
  } catch (const CLI::ParseError& error) {
    throw InputError(error.what());
  }
}

bool CommandLine::is_given(const std::string& name) const {
  return impl_->app.get_option("--" + name)->count() > 0;
}

std::map<std::string, std::string> CommandLine::deciding() const {
  std::map<std::string, std::string> values;
  for (const auto& [name, value] : impl_->deciding) values[name] = value();
  return values;
}

int report_error(const char* program, const std::string& message) {
  const bool beside_progress = ::isatty(STDOUT_FILENO) && ::isatty(STDERR_FILENO);
  std::fprintf(stderr, "%s%s: error: %s\n", beside_progress ? "\n" : "", program,
               message.substr(0, message.find('\n')).c_str());
  return 2;
}
