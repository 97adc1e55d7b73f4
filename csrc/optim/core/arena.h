#pragma once

// The storage of optimizer state. An arena is a set of flat tensors with the state of many parameters, so
// that one operator call can step all of them. Each parameter's state is a view into these tensors.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "offload/host_params.h"
#include "optim/optimizer_table.h"
#include "optim/rule.h"
#include "optim/split/split_params.h"
#include "quantization/map_4bit.h"

namespace shoestring::optim::detail {

inline constexpr const char* kStates[] = {"8bit", "4bit", "bf16", "fp32"};
inline constexpr const char* kRoundings[] = {"nearest", "stochastic", "remainder"};
inline constexpr int64_t kBlock = kernels::kStateBlock;

/// The part of a parameter that this process holds, if processes split parameters. A whole parameter has no
/// groups.
struct Shard {
  // The process groups over which the parameter is split. The norm of its gradient is summed over them.
  std::vector<std::string> groups;
  int64_t piece = 0;                 // index of this process's shard among the shards of the parameter
  at::DeviceType device = at::kCPU;  // the device type on which these process groups communicate

  bool operator==(const Shard& other) const = default;
};

/// Properties that all parameters of an arena (flat tensors of optimizer state) share: state format, whether
/// a 16-bit remainder of each weight is stored, devices, and how processes split the parameters.
struct Kind {
  std::string state;
  bool remainder;
  at::Device device;  // device on which the parameters are stepped
  at::Device source;  // device that holds the parameters
  Shard shard{};

  bool operator==(const Kind& other) const = default;
};

Kind kind_of(const Tensor& param, const LowMemoryOptions& options);

inline int64_t blocks_of(const Tensor& param) { return (param.numel() + kBlock - 1) / kBlock; }

/// One tensor of the optimizer state, such as a moment or its scales: name, dtype, and number of elements per
/// block of 256 parameter elements.
struct Part {
  std::string name;
  at::ScalarType dtype;
  int64_t per_block;
  // Whether a parameter's view of this state tensor has the parameter's shape. Otherwise the view is flat
  // and covers whole blocks.
  bool shaped;

  std::vector<int64_t> shape(const Tensor& param) const {
    return shaped ? param.sizes().vec() : std::vector<int64_t>{blocks_of(param) * per_block};
  }
};

/// Describes the tensors in a parameter's optimizer state, except for the tensor `step`.
std::vector<Part> parts(const Rule& rule, const Kind& kind);

/// The number of this process, and that of all processes that split the steps of an optimizer.
struct Ranks {
  int64_t rank, count;
  std::string group;  // the name under which c10d knows the processes
};

/// The part of an arena that one process steps: parameters [first, last), from block `first_block` of the
/// first one, `blocks` blocks in all. All processes' parts follow each other.
struct Owned {
  size_t first = 0, last = 0;
  int64_t first_block = 0, blocks = 0;
};

/// The optimizer state of all parameters in a parameter group that have the same Kind (state format and
/// devices). The state of each parameter begins at a multiple of 256 elements.
struct Arena {
  Kind kind;
  std::vector<Tensor> params;
  std::vector<int64_t> begins;  // index of the first block of each parameter's state
  int64_t blocks;
  Tensor step;
  // The flat state tensors, by the name of the operator's argument, such as exp_avg.
  std::map<std::string, Tensor> values;
  // Index of each parameter among all parameters of the optimizer. It selects the random bits of stochastic
  // rounding.
  std::vector<int64_t> numbers;
  Tensor accumulated;

  // The next members are used only if the optimizer state is offloaded. The tensors in `values` are then in
  // host memory or in a file.
  c10::intrusive_ptr<offload::State> offloaded;
  int64_t start = 0;  // index of this arena's first parameter among the parameters of `offloaded`
  Tensor stepped;     // new step counters, copied to `step` when the optimizer step is complete
  // Set if the arena holds only some blocks of its parameters: index of the arena's first block in the first
  // parameter, and number of blocks in the arena.
  std::optional<std::pair<int64_t, int64_t>> part;

  // The next members are used only with set_offload("cpu"): the CPU steps copies of parameters that are on
  // another device.
  c10::intrusive_ptr<offload::HostParams> host;
  std::vector<Tensor> weights;  // copies of the parameters in host memory
  bool has_fetched = false;     // whether the gradients of the current step are in host memory
  // After a failed step: index of the first parameter that has not been stepped.
  size_t next_param = 0;

  // The next members are used only if processes split the steps. The tensors in `values` then hold the blocks
  // of this process alone.
  std::vector<Owned> owned;  // the part of each process
  size_t rank = 0;
  std::string group;  // see Ranks

  /// Creates an arena in which all optimizer state is zero.
  Arena(const Rule& rule, const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers,
        const c10::intrusive_ptr<offload::Offload>& offload, bool on_host, const std::optional<Ranks>& ranks);

  /// Returns the parts of parameters of one arena that each of `ranks` processes steps, on the CPU or
  /// elsewhere.
  static std::vector<std::vector<ParameterPart>> split(const Rule& rule, std::vector<Tensor> params,
                                                       int64_t ranks, bool on_cpu);
  /// Raises if a parameter has left the device for which its state was made.
  void check_place(const std::string& optimizer) const;
  /// Returns the optimizer state of parameter `index`, as views into the arena. If processes split the steps,
  /// the tensors have this process's elements, which may be none.
  std::map<std::string, Tensor> views(const Rule& rule, size_t index) const;
  /// Returns whether this process steps blocks of parameter `index`.
  bool owns(size_t index) const {
    return owned.empty() || (index >= owned[rank].first && index < owned[rank].last);
  }
  /// Returns the elements [begin, end) of parameter `index` that a process steps.
  std::pair<int64_t, int64_t> elements_of(size_t process, size_t index) const;
  /// Returns the parts of parameters that a process steps, without those of no elements.
  std::vector<ParameterPart> parts_of(size_t process) const;
  /// Returns an arena of the parameters of which this process steps blocks.
  Arena own_piece() const;
  /// Returns how processes that split the steps split the tensors of the state of parameter `index`.
  std::map<std::string, SplitTensor> splits(const Rule& rule, size_t index) const;
  /// Copies the state of parameter `index` to this arena: the state of one process, or this process's part.
  void set_state(const Rule& rule, size_t index, const std::map<std::string, Tensor>& state, bool is_part);
  /// Returns a view of each parameter's accumulated gradient, in the parameter's shape. The first call
  /// allocates the accumulated gradients as zeros.
  std::vector<Tensor> accumulated_views(at::ScalarType dtype);
  /// Returns the tensors that the operator steps: the parameters, or their copies in host memory.
  const std::vector<Tensor>& stepped_params() const { return weights.empty() ? params : weights; }
  /// Returns an arena of the parameters [first, last) whose tensors are views into this arena.
  Arena run(const Rule& rule, size_t first, size_t last) const;

  using Gradients = std::vector<Tensor>;
  /// Copies the offloaded state to the device in chunks, and calls `step` for each chunk with the gradients
  /// and accumulated gradients that belong to it. If the same optimizer step has failed before, skips the
  /// chunks that have already been stepped.
  void in_pieces(
      const Rule& rule, const Gradients& grads, const Tensor& accumulated,
      c10::function_ref<void(const Arena& piece, const Gradients& grads, const Tensor& accumulated)> step);
  /// Completes an optimizer step of offloaded state: stores the new step counters after all chunks of state
  /// have been stepped.
  void commit();

 private:
  Arena(const Kind& kind, std::vector<Tensor> params, std::vector<int64_t> numbers);
  /// Returns an arena of a part of the parameters, without values. Its step counters are views.
  Arena piece(const Owned& part) const;
  void take_elements(Gradients& grads, int64_t first, int64_t first_block, int64_t blocks) const;
};

/// Returns the number of bytes that the optimizer state of `params`, or of this process's part of it, takes
/// in the file of set_offload("nvme:DIR").
int64_t offloaded_bytes(const Rule& rule, const Kind& kind, const std::vector<Tensor>& params,
                        const std::vector<int64_t>& numbers, const std::optional<Ranks>& ranks);

/// Raises c10::Error unless a parameter's state has the names, dtypes and shapes that `rule` and `kind`
/// require.
void check_state(const Rule& rule, const ParamState& state, const Tensor& param, const Kind& kind);

}  // namespace shoestring::optim::detail
