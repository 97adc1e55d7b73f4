#pragma once

// Gradient checkpointing for C++ programs: backward computes activations again instead of storing them.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/arg.h>

#include <shoestring/checkpoint/autograd.h>
#include <shoestring/core/export.h>

namespace shoestring {

struct CheckpointOptions {
  /// Operators of the checkpointed function whose results are stored, so that backward does not compute them
  /// again. Accepts operator names ("aten::mm"), the groups "attention" and "products", and tags (see
  /// tag_activation).
  TORCH_ARG(std::vector<std::string>, keep);
  /// Whether the second run of the checkpointed function, in backward, draws the same random numbers as the
  /// first run.
  TORCH_ARG(bool, preserve_rng_state) = true;
  /// Whether the second run of the checkpointed function, in backward, stops as soon as it has produced the
  /// last tensor that backward needs. Turn it off for functions whose last activation is RReLU in training
  /// mode: autograd saves its noise before it is drawn, so gradients would be wrong.
  TORCH_ARG(bool, early_stop) = true;
  /// Buffers that the function changes, such as `model->buffers()` with the running statistics of batch
  /// norms. The second run leaves them as they are before it, so that each batch counts once. A function that
  /// is a module includes its own buffers; a lambda that captures modules does not.
  TORCH_ARG(std::vector<at::Tensor>, buffers);
};

namespace detail {

/// Raise if the number of segments or tiles is not from 1 to the number of blocks or elements.
SHOESTRING_API void check_segments(int64_t segments, int64_t count);
SHOESTRING_API void check_tiles(const char* op, int64_t tiles, int64_t length, const char* what);
/// Concatenates `parts`, the results of a function for tiles of x, along dim. Raises if the concatenation and
/// x have different lengths along dim.
SHOESTRING_API at::Tensor joined(const std::vector<at::Tensor>& parts, int64_t dim, const at::Tensor& x);
/// Splits each weight into `tiles` tiles. Each element of `weights` is a weight and the dimension along which
/// it is split. Element [i][j] of the result is tile i of weight j.
SHOESTRING_API std::vector<std::vector<at::Tensor>> tiles_of(
    const std::vector<std::pair<at::Tensor, int64_t>>& weights, int64_t tiles);
/// Returns total + part. An undefined total counts as zero. The sum is in fp32 if part has a 16-bit dtype.
SHOESTRING_API at::Tensor added(const at::Tensor& total, const at::Tensor& part);

/// Runs a checkpointed function a second time, with the given tensors in place of its inputs.
using RunAgain = std::function<void(const std::vector<at::Tensor>&)>;
/// Returns the buffers of a function that is a module.
using BuffersOf = std::function<std::vector<at::Tensor>()>;

template <class F>
std::vector<at::Tensor> buffers_of(const F& fn) {
  if constexpr (requires { fn->buffers(); }) {
    return fn->buffers();
  } else if constexpr (requires { fn.buffers(); }) {
    return fn.buffers();
  } else {
    return {};
  }
}

/// Guards the first run of a checkpointed function. Tensors that autograd saves during the first run are
/// dropped and computed again in backward. The first run lasts until finish(), or until the destructor if the
/// function throws.
class SHOESTRING_API CheckpointRun {
 public:
  CheckpointRun(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, RunAgain again,
                BuffersOf buffers);
  ~CheckpointRun();
  void finish();
  CheckpointRun(const CheckpointRun&) = delete;
  CheckpointRun& operator=(const CheckpointRun&) = delete;

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

/// Takes all tensors out of an argument of a checkpointed function, and later puts other tensors in their
/// places.
struct Tensors {
  std::vector<at::Tensor> all;
  size_t next = 0;

  void take(at::Tensor& tensor) { all.push_back(std::exchange(tensor, {})); }
  void put(at::Tensor& tensor) { tensor = all[next++]; }
  template <class T>
  void take(std::vector<T>& list) {
    for (T& item : list) take(item);
  }
  template <class T>
  void put(std::vector<T>& list) {
    for (T& item : list) put(item);
  }
  template <class T>
  void take(std::optional<T>& item) {
    if (item) take(*item);
  }
  template <class T>
  void put(std::optional<T>& item) {
    if (item) put(*item);
  }
  template <class... T>
  void take(std::tuple<T...>& items) {
    std::apply([this](T&... item) { (take(item), ...); }, items);
  }
  template <class... T>
  void put(std::tuple<T...>& items) {
    std::apply([this](T&... item) { (put(item), ...); }, items);
  }
  template <class T>
  void take(T&) {}
  template <class T>
  void put(T&) {}
};

template <class T>
struct is_tuple : std::false_type {};
template <class... T>
struct is_tuple<std::tuple<T...>> : std::true_type {};

template <class F, class Inputs>
decltype(auto) call(F& fn, const Inputs& inputs) {
  if constexpr (is_tuple<Inputs>::value) {
    return std::apply(fn, inputs);
  } else {
    return fn(inputs);
  }
}

}  // namespace detail

/// Returns fn(inputs) without storing the activations of fn (gradient checkpointing, Chen et al. 2016).
/// Autograd stores only the inputs and the results that `options.keep` names. Backward runs fn a second time
/// to compute the rest, with the random numbers and the autocast state of the first run. The gradients are
/// bitwise equal to those without checkpoint.
///
/// inputs: a Tensor, a std::vector, or a std::tuple whose items are the arguments of fn. Autograd saves the
/// tensors in it, also those inside vectors and optionals; all other values are copied.
///
/// fn may capture modules and tensors; it lives as long as the graph. It may return any type. It must do the
/// same in both runs: different shapes, dtypes or operators raise an error in backward. It must not change
/// its inputs in place. Name the buffers that it changes in `options.buffers`, unless fn is their module.
///
/// The results of moe_route and moe_sort in fn are always stored, so the second run chooses the same experts.
///
/// Calls may be nested. autograd::grad (also inside fn), retain_graph, second derivatives, exceptions in fn
/// and tensors without gradients behave as without checkpoint. If fn itself starts a backward pass, each such
/// pass runs fn again. While gradient mode is off, checkpoint only calls fn(inputs).
///
/// checkpoint works only in programs without Python. Throws c10::Error unless install_autograd_engine() was
/// called at the start of main().
template <class F, class Inputs>
auto checkpoint(F fn, Inputs inputs, const CheckpointOptions& options = {}) {
  detail::Tensors tensors;
  Inputs rest = inputs;
  tensors.take(rest);
  auto again = [fn, rest = std::move(rest)](const std::vector<at::Tensor>& given) mutable {
    Inputs filled = rest;
    detail::Tensors(detail::Tensors{given}).put(filled);
    static_cast<void>(detail::call(fn, filled));
  };
  detail::CheckpointRun run(options, tensors.all, std::move(again), [fn] { return detail::buffers_of(fn); });
  if constexpr (std::is_void_v<decltype(detail::call(fn, inputs))>) {
    detail::call(fn, inputs);
    run.finish();
  } else {
    auto result = detail::call(fn, inputs);
    run.finish();
    return result;
  }
}

/// Computes fn(x) in tiles of x along dim, so the intermediate results of fn exist for one tile at a time,
/// also in backward. Use it for functions that treat each position along dim separately, as an MLP treats
/// tokens. fn takes a tile and returns a tensor of the same length along dim. Autograd stores only x.
template <class F>
at::Tensor tiled(F fn, const at::Tensor& x, int64_t tiles, int64_t dim = -2,
                 const CheckpointOptions& options = {}) {
  detail::check_tiles("tiled", tiles, x.size(dim), "elements along dim");
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tile : x.tensor_split(tiles, dim)) parts.push_back(checkpoint(fn, tile, options));
  return detail::joined(parts, dim, x);
}

/// Computes the sum of fn(x, tile) over tiles of the weights' features. The sum is accumulated in fp32 and
/// rounded once. Intermediate results of fn exist for one tile at a time.
///
/// weights: pairs of a weight and the dimension of its features. All weights must have the same length along
/// that dimension. fn takes x and a std::vector with one tile of each weight.
template <class F>
at::Tensor tiled_features(F fn, const at::Tensor& x,
                          const std::vector<std::pair<at::Tensor, int64_t>>& weights, int64_t tiles,
                          const CheckpointOptions& options = {}) {
  at::Tensor part, total;
  for (const auto& piece : detail::tiles_of(weights, tiles)) {
    part = checkpoint(fn, std::tuple(x, piece), options);
    total = detail::added(total, part);
  }
  return total.to(part.scalar_type());
}

/// Returns the rows at which the tiles of a weight (rows, columns) begin, and then `rows`: tile i is rows
/// [result[i], result[i + 1]). Tiles begin at multiples of 256 elements of the weight where the number of
/// tiles allows it, so that 8-bit optimizer state of the tiles has the blocks that the state of the whole
/// weight has.
SHOESTRING_API std::vector<int64_t> tile_rows(int64_t rows, int64_t columns, int64_t tiles);

/// Returns the outputs of the tiles of one layer for x, concatenated along the last dimension. The tiles are
/// layers with rows of the weight each. The gradient of x is summed in fp32 and rounded once. Backward of a
/// tile ends before backward of the one before it begins, so OffloadWeights needs the weights of two tiles at
/// a time. Example, with a block of `offload` for each tile:
///
///     for (const auto& tile : tiles) offload.add(tile->parameters());
///     std::vector<std::function<at::Tensor(const at::Tensor&)>> functions;
///     for (size_t i = 0; i < tiles.size(); ++i) {
///       functions.push_back([&, i](const at::Tensor& x) {
///         return offload.run(i, x, [&](const at::Tensor& y) { return tiles[i]->forward(y); });
///       });
///     }
///     y = tiled_outputs(functions, x);
SHOESTRING_API at::Tensor tiled_outputs(
    const std::vector<std::function<at::Tensor(const at::Tensor&)>>& tiles, const at::Tensor& x);

/// Returns whether this thread is in the second run of a checkpointed function, in backward. Modules that
/// count their forward passes ask for it, so that each pass counts once.
SHOESTRING_API bool is_recomputing();

/// Returns x itself and gives it a name for CheckpointOptions::keep. If the name is in `keep` of a
/// surrounding checkpoint, that checkpoint stores all results of the operator that made x. Backward then does
/// not compute these results again. Without such a checkpoint, tagging has no effect. x must not have been
/// modified in place.
SHOESTRING_API at::Tensor tag_activation(const at::Tensor& x, const std::string& tag);

/// Runs functions one after the other, in `segments` parts of about equal length. Each function takes one
/// Tensor and returns one. Each part except the last runs under checkpoint. Backward begins with the last
/// part, so checkpointing it would save no memory.
template <class Functions>
at::Tensor checkpoint_sequential(const Functions& functions, int64_t segments, at::Tensor x,
                                 const CheckpointOptions& options = {}) {
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps(std::begin(functions), std::end(functions));
  const auto count = static_cast<int64_t>(steps.size());
  detail::check_segments(segments, count);
  for (int64_t part = 0, begin = 0; part < segments; ++part) {
    const int64_t end = part + 1 == segments ? count : begin + count / segments;
    const auto run =
        [part = decltype(steps)(steps.begin() + begin, steps.begin() + end)](const at::Tensor& input) {
          at::Tensor y = input;
          for (const auto& step : part) y = step(y);
          return y;
        };
    x = part + 1 == segments ? run(x) : checkpoint(run, x, options);
    begin = end;
  }
  return x;
}

}  // namespace shoestring
