#pragma once

// Where the state of optimizers lies: flat arenas that an operator steps in one call, and a parameter's views
// of them. Sizes, names and numbers are those of Python (shoestring/optim/arena.py), so that state and random
// bits are, too.

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

/// What the parameters of an arena have in common.
struct Kind {
  std::string state;
  bool remainder;
  at::Device device;  // where they are stepped
  at::Device source;  // where they lie

  bool operator==(const Kind& other) const = default;
};

Kind kind_of(const Tensor& param, const LowMemoryOptions& options);

inline int64_t blocks_of(const Tensor& param) { return (param.numel() + kBlock - 1) / kBlock; }

/// A kind of entry: its dtype, and what it takes of an arena for each block of 256 elements.
struct Part {
  std::string name;
  at::ScalarType dtype;
  int64_t per_block;
  bool shaped;  // as the parameter; else flat, whole blocks

  std::vector<int64_t> shape(const Tensor& param) const {
    return shaped ? param.sizes().vec() : std::vector<int64_t>{blocks_of(param) * per_block};
  }
};

/// The entries of a parameter, but for its step.
std::vector<Part> parts(const Rule& rule, const Kind& kind);

/// The state of a group's parameters of one kind, each beginning at a multiple of a block.
struct Arena {
  Kind kind;
  std::vector<Tensor> params;
  std::vector<int64_t> begins;  // in blocks, of each parameter
  int64_t blocks;
  Tensor step;
  std::map<std::string, Tensor> values;  // by the names of the operator's arguments
  std::vector<int64_t> numbers;          // of the parameters among all of the optimizer, for random bits
  Tensor accumulated;

  // Where the state is offloaded (values are then host memory, or a file's):
  c10::intrusive_ptr<offload::State> offloaded;
  int64_t start = 0;  // of the parameters among those of offloaded
  Tensor stepped;     // step, while a step is under way
  std::optional<std::pair<int64_t, int64_t>>
      part;  // of a piece: the first parameter's first block, how many blocks

  // Where the CPU steps what lies on a device:
  c10::intrusive_ptr<offload::HostParams> host;
  std::vector<Tensor> weights;  // in host memory
  bool has_fetched = false;     // gradients of the step that is under way
  size_t next_param = 0;        // of a step that failed: the first that has not been stepped

  /// Zeros.
  Arena(const Rule& rule, const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers,
        const c10::intrusive_ptr<offload::Offload>& offload, bool on_host);

  /// A parameter's state: views.
  std::map<std::string, Tensor> views(const Rule& rule, size_t index) const;
  /// A gradient's sum for each parameter, in its shape; zeros, until something is added.
  std::vector<Tensor> accumulated_views(at::ScalarType dtype);
  /// What an operator steps.
  const std::vector<Tensor>& stepped_params() const { return weights.empty() ? params : weights; }
  /// The part of some parameters, side by side, as an arena of its own.
  Arena run(const Rule& rule, size_t first, size_t last) const;

  using Gradients = std::vector<Tensor>;
  /// What is offloaded, in pieces that are on the device, with their gradients and sums. What had been
  /// stepped when the same step failed before is left out.
  void in_pieces(
      const Rule& rule, const Gradients& grads, const Tensor& accumulated,
      c10::function_ref<void(const Arena& piece, const Gradients& grads, const Tensor& accumulated)> step);
  /// All pieces have been stepped.
  void commit();

 private:
  Arena(const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers);
};

/// The bytes that the state of these parameters takes in an offload's file.
int64_t offloaded_bytes(const Rule& rule, const Kind& kind, const std::vector<Tensor>& params);

/// Raises c10::Error where a parameter's state does not fit.
void check_state(const Rule& rule, const ParamState& state, const Tensor& param, const Kind& kind);

}  // namespace shoestring::optim::detail
