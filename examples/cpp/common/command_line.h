#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

/// The options of a program. Each option sets a variable, whose value before parse() is the default. CLI11
/// parses the options; only command_line.cpp includes it, since it takes seconds to compile.
class CommandLine {
 public:
  /// Whether an option affects the result of training. A run can only be resumed with the same values of the
  /// options that do.
  enum Effect { kDecides, kMayChange };

  /// about: first line of the text that --help prints.
  explicit CommandLine(const std::string& about);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  /// Adds a text option. If `choices` is not empty, the value must be one of them.
  void add(const char* name, std::string& value, Effect effect, const std::string& help,
           const std::vector<std::string>& choices = {});
  /// Adds an option with a number from `least` to `most`.
  void add(const char* name, int64_t& value, int64_t least, int64_t most, Effect effect,
           const std::string& help);
  void add(const char* name, double& value, double least, double most, Effect effect,
           const std::string& help);
  /// Adds an option without a value, which sets `value` to true.
  void add(const char* name, bool& value, Effect effect, const std::string& help);

  /// Parses the command line. Raises InputError. `--help` prints all options with their defaults, and ends
  /// the program.
  void parse(int argc, const char* const* argv);
  /// Returns whether the command line has an option, whose name is one that add() has received.
  bool is_given(const std::string& name) const;
  /// Returns the values of all options that affect the result of training, by the option's name.
  std::map<std::string, std::string> deciding() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Prints an error as the line "PROGRAM: error: MESSAGE" on stderr. Returns the exit code 2.
int report_error(const char* program, const std::string& message);
