#pragma once

#include <string>
#include <vector>

#include "../common/options.h"

/// The options of finetune: those that the training programs share, with other defaults, and its own.
struct FinetuneOptions : LoopOptions {
  FinetuneOptions() {
    lr = 2e-4;
    weight_decay = 0;
    betas = {0.9, 0.999};
  }

  std::string model, json, logits;
  std::string quantize = "nf4", target_modules = "all-linear", init = "default";
  int64_t block_size = 64, rank = 16;
  double alpha = 32, lr_ratio = 1;
  bool no_double_quant = false, keep_memory = false;
  std::string offload_weights = "none", keep;

  bool double_quant() const { return !no_double_quant && (quantize == "nf4" || quantize == "fp4"); }
  /// Returns whether frozen weights are away while no layer needs them, and the folder of their file, which
  /// is empty for host memory.
  bool weights_leave() const { return offload_weights != "none"; }
  std::string weights_folder() const { return offload_weights == "cpu" ? "" : offload_weights.substr(5); }
  /// Returns the names of the layers that get an adapter. An empty list selects all linear layers.
  std::vector<std::string> targets() const;
};

/// Parses and checks the command line of finetune. Raises InputError. `--help` prints the options and ends
/// the program.
FinetuneOptions parse_options(int argc, const char* const* argv);
