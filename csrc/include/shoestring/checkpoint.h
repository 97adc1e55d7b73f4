#pragma once

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

#include <shoestring/export.h>

namespace shoestring {

struct CheckpointOptions {
  /// Operators whose results are kept, so that backward does not compute them again: names ("aten::mm"), the
  /// groups "attention" and "products", and tags (tag_activation).
  TORCH_ARG(std::vector<std::string>, keep);
  /// Draw the same random numbers in both runs.
  TORCH_ARG(bool, preserve_rng_state) = true;
  /// End the second run at the last tensor that backward needs.
  TORCH_ARG(bool, early_stop) = true;
};

namespace detail {

SHOESTRING_API void check_segments(int64_t segments, int64_t count);
SHOESTRING_API void check_tiles(const char* op, int64_t tiles, int64_t length, const char* what);
/// The parts of a result one after the other, which is as long as x.
SHOESTRING_API at::Tensor joined(const std::vector<at::Tensor>& parts, int64_t dim, const at::Tensor& x);
/// By tile, then by weight.
SHOESTRING_API std::vector<std::vector<at::Tensor>> tiles_of(
    const std::vector<std::pair<at::Tensor, int64_t>>& weights, int64_t tiles);
/// total + part, in fp32 where they are of 16 bits.
SHOESTRING_API at::Tensor added(const at::Tensor& total, const at::Tensor& part);

/// The first run of a function whose saved tensors are forgotten: until finish(), or, where it throws, the
/// destructor.
class SHOESTRING_API CheckpointRun {
 public:
  /// again: the function, given its tensors anew.
  CheckpointRun(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                std::function<void(const std::vector<at::Tensor>&)> again);
  ~CheckpointRun();
  void finish();
  CheckpointRun(const CheckpointRun&) = delete;
  CheckpointRun& operator=(const CheckpointRun&) = delete;

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

/// Takes the tensors out of an argument, and puts others in their places.
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

/// fn(inputs), of which autograd keeps the inputs and what the options name, and nothing else: backward runs
/// fn a second time for the rest (gradient checkpointing, Chen et al. 2016), with the random numbers and the
/// autocast state of the first. The gradients are bitwise those without checkpoint.
///
/// inputs: a Tensor, a std::vector, or a std::tuple, whose items are fn's arguments; tensors in it, in
/// vectors and optionals too, are kept as autograd keeps them, the rest is copied. fn may take whatever else
/// it needs by capture (modules, tensors); it lives as long as the graph does. It returns anything, and has
/// to do the same both times: other shapes, dtypes or operators are an error in backward. Calls may be
/// nested; autograd::grad (inside fn, too), retain_graph, a second derivative, exceptions in fn and tensors
/// without gradients are as without checkpoint. fn runs again for each backward pass that it begins itself.
/// fn must not change its inputs in place. Without gradient mode it is fn(inputs) and nothing else.
///
/// For programs without Python: in a process with Python's autograd engine it throws c10::Error, and Python
/// has shoestring.checkpoint.
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
  detail::CheckpointRun run(options, tensors.all, std::move(again));
  if constexpr (std::is_void_v<decltype(detail::call(fn, inputs))>) {
    detail::call(fn, inputs);
    run.finish();
  } else {
    auto result = detail::call(fn, inputs);
    run.finish();
    return result;
  }
}

/// fn(x) in tiles of x along dim: what fn makes on the way exists for one tile at a time, in backward too.
/// For what treats the places along dim apart, such as an MLP its tokens. fn takes a tile and returns one as
/// long; backward keeps x alone.
template <class F>
at::Tensor tiled(F fn, const at::Tensor& x, int64_t tiles, int64_t dim = -2,
                 const CheckpointOptions& options = {}) {
  detail::check_tiles("tiled", tiles, x.size(dim), "places along dim");
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tile : x.tensor_split(tiles, dim)) parts.push_back(checkpoint(fn, tile, options));
  return detail::joined(parts, dim, x);
}

/// fn(x, tiles of the weights), added up over tiles of their features (in fp32, rounded once): what is made
/// of them exists for one tile at a time. weights: each with the dimension along which its features lie,
/// equally long there. fn takes x and a std::vector of a tile of each.
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

/// x itself, which a checkpoint around this that was asked to `keep` the tag does not make again in backward:
/// the results of the operator that made x are kept. Elsewhere it does nothing. x was not modified in place
/// since it was made.
SHOESTRING_API at::Tensor tag_activation(const at::Tensor& x, const std::string& tag);

/// Runs functions (of one Tensor, returning one) one after the other in `segments` parts of about equal
/// length, each but the last under checkpoint: the last is what backward begins with, so nothing would be
/// gained.
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
