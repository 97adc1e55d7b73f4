#pragma once

// The storage of optimizer state. Arenas are flat tensors that an operator steps in one call; each
// parameter's state is a view into them. Sizes, names and parameter numbers equal those of Python
// (shoestring/optim/arena.py), so that state and random bits are equal, too.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "offload/host_params.h"
#include "optim/optimizer_table.h"
#include "optim/rule.h"
#include "quantization/map_4bit.h"

namespace shoestring::optim::detail {

inline constexpr const char* kStates[] = {"8bit", "4bit", "bf16", "fp32"};
inline constexpr const char* kWeights[] = {"plain", "stochastic", "remainder"};
inline constexpr int64_t kBlock = kernels::kStateBlock;

/// Properties that all parameters of an arena share.
struct Kind {
  std::string state;
  bool remainder;
  at::Device device;  // device that steps the parameters
  at::Device source;  // device of the parameters

  bool operator==(const Kind& other) const = default;
};

Kind kind_of(const Tensor& param, const LowMemoryOptions& options);

inline int64_t blocks_of(const Tensor& param) { return (param.numel() + kBlock - 1) / kBlock; }

/// One entry of the state: its name, its dtype, and the number of its elements per block of 256 parameters.
struct Part {
  std::string name;
  at::ScalarType dtype;
  int64_t per_block;
  bool shaped;  // whether views have the parameter's shape; if not, they are flat and cover whole blocks

  std::vector<int64_t> shape(const Tensor& param) const {
    return shaped ? param.sizes().vec() : std::vector<int64_t>{blocks_of(param) * per_block};
  }
};

/// Returns the entries of a parameter's state, except `step`.
std::vector<Part> parts(const Rule& rule, const Kind& kind);

/// The state of all parameters of a group that have the same kind. Each parameter begins at a block boundary.
struct Arena {
  Kind kind;
  std::vector<Tensor> params;
  std::vector<int64_t> begins;  // first block of each parameter in the arena
  int64_t blocks;
  Tensor step;
  std::map<std::string, Tensor> values;  // key: name of the operator's argument
  // The parameters' numbers in the whole optimizer, which select their random bits.
  std::vector<int64_t> numbers;
  Tensor accumulated;

  // The next members are for offloaded state. `values` is then in host memory or in a file.
  c10::intrusive_ptr<offload::State> offloaded;
  int64_t start = 0;  // index of the arena's first parameter in `offloaded`
  Tensor stepped;     // the new step counters, while a step is in progress
  // In a piece that holds parts of parameters: the first parameter's first block, and the number of
  // blocks.
  std::optional<std::pair<int64_t, int64_t>> part;

  // The next members are for parameters on a device that the CPU steps.
  c10::intrusive_ptr<offload::HostParams> host;
  std::vector<Tensor> weights;  // copies of the parameters in host memory
  bool has_fetched = false;     // whether the gradients of the current step are in host memory
  // After a failed step: index of the first parameter that has not been stepped.
  size_t next_param = 0;

  /// Creates an arena of zeros.
  Arena(const Rule& rule, const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers,
        const c10::intrusive_ptr<offload::Offload>& offload, bool on_host);

  /// Returns a parameter's state, as views into the arena.
  std::map<std::string, Tensor> views(const Rule& rule, size_t index) const;
  /// Returns the sum of gradients of each parameter, in the parameter's shape; zeros at first.
  std::vector<Tensor> accumulated_views(at::ScalarType dtype);
  /// Returns the tensors that the operator steps: the parameters, or their copies in host memory.
  const std::vector<Tensor>& stepped_params() const { return weights.empty() ? params : weights; }
  /// Returns an arena over consecutive parameters [first, last), with views into this one.
  Arena run(const Rule& rule, size_t first, size_t last) const;

  using Gradients = std::vector<Tensor>;
  /// Calls `step` for each piece of the offloaded state, once it is on the device, with its gradients and
  /// sums. If the same step has failed before, skips the pieces that it has finished.
  void in_pieces(
      const Rule& rule, const Gradients& grads, const Tensor& accumulated,
      c10::function_ref<void(const Arena& piece, const Gradients& grads, const Tensor& accumulated)> step);
  /// Completes a step, after all pieces have been stepped.
  void commit();

 private:
  Arena(const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers);
};

/// Returns the number of bytes that the state of these parameters takes in an offload's file.
int64_t offloaded_bytes(const Rule& rule, const Kind& kind, const std::vector<Tensor>& params);

/// Raises c10::Error if a parameter's state does not fit.
void check_state(const Rule& rule, const ParamState& state, const Tensor& param, const Kind& kind);

}  // namespace shoestring::optim::detail
