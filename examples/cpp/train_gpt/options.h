#pragma once

#include <map>
#include <string>

#include "../common/options.h"

/// The options of train_gpt: those that the training programs share, and its own.
struct TrainOptions : LoopOptions {
  int64_t layers = 6, hidden = 256, heads = 4, kv_heads = 4, checkpoint_every = 50;
  int64_t experts = 0, top_k = 2;  // without experts, the model has dense MLPs
  bool resume = false;

  /// The values of all options that affect the result of training, by name. A run can be resumed only with
  /// the same values.
  std::map<std::string, std::string> deciding;
};

/// Parses and checks the command line of train_gpt. Raises InputError. `--help` prints the options and ends
/// the program.
TrainOptions parse_options(int argc, const char* const* argv);
