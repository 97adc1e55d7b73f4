#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Options {
  std::string model, data, out, json, logits;
  std::string quantize = "nf4", dtype = "bf16";
  int64_t block_size = 64;
  bool no_nested = false;
  int64_t rank = 16;
  double alpha = 32;
  std::string targets, init = "default";
  int64_t steps = 100, batch_size = 1, seq_len = 512, accumulate = 1;
  double lr = 2e-4, lr_ratio = 1;
  int64_t warmup = 10;
  double weight_decay = 0, clip = 1.0;
  int64_t seed = 0, threads = 0, workspace_mb = 16;
  bool no_recompute = false, keep_memory = false;

  bool nested() const { return !no_nested && (quantize == "nf4" || quantize == "fp4"); }
  /// Returns the names of the layers that get an adapter. An empty list selects all linear layers.
  std::vector<std::string> target_modules() const;
};

/// Parses and checks the command line of finetune. Raises InputError. `--help` prints the options and ends
/// the program.
Options parse_options(int argc, char** argv);
