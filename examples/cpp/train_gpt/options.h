#pragma once

#include <cstdint>
#include <map>
#include <string>

struct Options {
  std::string data, out, offload = "none";
  int64_t layers = 6, hidden = 256, heads = 4, kv_heads = 4;
  int64_t steps = 200, batch_size = 8, seq_len = 256, accumulate = 1;
  double lr = 1e-3;
  int64_t warmup = 10;
  double weight_decay = 0.1, clip = 1.0;
  int64_t seed = 0, checkpoint_every = 100, threads = 0, memory_budget = 0;
  bool resume = false, plain = false;
};

/// Parses and checks the command line of train_gpt. Raises InputError. `--help` prints the options and ends
/// the program.
Options parse_options(int argc, char** argv);

/// Returns the values of all options that affect the result of training, by name. A run can be resumed only
/// with the same values.
std::map<std::string, std::string> deciding_options(const Options& options);
