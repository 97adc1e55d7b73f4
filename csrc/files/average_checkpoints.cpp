#include <shoestring/files/average_checkpoints.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <deque>

#include "core/huge_pages.h"
#include "core/tensors.h"
#include "files/safetensors_files.h"
#include "files/safetensors_format.h"
#include "files/safetensors_writer.h"

namespace shoestring {
namespace {

using at::Tensor;
using files::quote;
using files::SafetensorsFiles;

constexpr const char* kAverage = "average_checkpoints";
// Number of elements that are converted and added at a time, so that a converted copy of a tensor is small.
constexpr int64_t kPieceElements = int64_t{1} << 16;

std::vector<double> checked_weights(size_t count, const std::optional<std::vector<double>>& weights) {
  TORCH_CHECK_VALUE(count > 0, kAverage, ": paths: expected at least one checkpoint, received none");
  if (!weights) return std::vector<double>(count, 1.0 / static_cast<double>(count));
  TORCH_CHECK_VALUE(weights->size() == count, kAverage, ": weights: expected ", count,
                    " numbers, one for each path, received ", weights->size());
  double sum = 0;
  for (const double w : *weights) sum += w;
  TORCH_CHECK_VALUE(std::abs(sum - 1) <= 1e-6, kAverage,
                    ": weights: expected numbers whose sum is 1, received the sum ", sum);
  return *weights;
}

std::string described(const SafetensorsFile::Entry& entry) {
  return c10::str(entry.dtype, " ", at::IntArrayRef(entry.shape));
}

/// Raises unless `other` has the names, dtypes and shapes of `first`.
void check_equal_headers(const SafetensorsFiles& first, const SafetensorsFiles& other,
                         const std::string& path) {
  for (const std::string& name : first.names()) {
    const auto& expected = first.entry(name);
    TORCH_CHECK_VALUE(other.contains(name), kAverage, ": ", path, ": tensor ", quote(name), ": expected ",
                      described(expected), ", as in the first checkpoint, received none");
    const auto& entry = other.entry(name);
    TORCH_CHECK_VALUE(entry.dtype == expected.dtype && entry.shape == expected.shape, kAverage, ": ",
                      other.file(name).path(), ": tensor ", quote(name), ": expected ", described(expected),
                      ", as in the first checkpoint, received ", described(entry));
  }
  for (const std::string& name : other.names()) {
    TORCH_CHECK_VALUE(first.contains(name), kAverage, ": ", other.file(name).path(), ": tensor ", quote(name),
                      ": expected only tensors of the first checkpoint, received another one");
  }
}

/// Adds weight * tensor to sum.
void add_pieces(const Tensor& sum, const Tensor& tensor, double weight) {
  const Tensor to = sum.view(-1), from = tensor.view(-1);
  for (int64_t begin = 0; begin < to.numel(); begin += kPieceElements) {
    const int64_t count = std::min(kPieceElements, to.numel() - begin);
    to.narrow(0, begin, count).add_(from.narrow(0, begin, count).to(sum.scalar_type()), weight);
  }
}

/// Returns the average of a tensor, rounded to its dtype.
Tensor average(const std::deque<SafetensorsFiles>& checkpoints, const std::vector<double>& weights,
               const std::string& name) {
  Tensor tensor = checkpoints[0].file(name).load(name);
  const Tensor sum = in_huge_pages(at::empty(tensor.sizes(), compute_type(tensor))).zero_();
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    if (i > 0) checkpoints[i].file(name).load_into(name, tensor);
    add_pieces(sum, tensor, weights[i]);
  }
  return tensor.copy_(sum);
}

/// Returns a tensor that is equal in all checkpoints, or raises.
Tensor common(const std::deque<SafetensorsFiles>& checkpoints, const std::string& name) {
  Tensor tensor = checkpoints[0].file(name).load(name);
  for (size_t i = 1; i < checkpoints.size(); ++i) {
    const SafetensorsFile& file = checkpoints[i].file(name);
    const Tensor summand = file.load(name);
    const bool is_equal = std::equal(static_cast<const char*>(tensor.const_data_ptr()),
                                     static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes(),
                                     static_cast<const char*>(summand.const_data_ptr()));
    TORCH_CHECK_VALUE(is_equal, kAverage, ": ", file.path(), ": tensor ", quote(name),
                      ": expected the values of ", "the first checkpoint, because ", tensor.scalar_type(),
                      " cannot be averaged, received others");
  }
  return tensor;
}

}  // namespace

void average_checkpoints(const std::vector<std::string>& paths, const std::string& out,
                         const std::optional<std::vector<double>>& weights) {
  const at::NoGradGuard no_grad;
  const auto factors = checked_weights(paths.size(), weights);
  std::deque<SafetensorsFiles> checkpoints;
  for (const std::string& path : paths) {
    checkpoints.emplace_back(path);
    check_equal_headers(checkpoints[0], checkpoints.back(), path);
  }
  const SafetensorsFiles& first = checkpoints[0];
  std::vector<files::TensorInfo> infos;
  for (const std::string& name : first.names()) {
    infos.push_back({name, first.entry(name).dtype, first.entry(name).shape});
  }
  const Metadata metadata = first.names().empty() ? Metadata() : first.file(first.names()[0]).metadata();
  files::SafetensorsWriter writer(kAverage, out, std::move(infos), metadata);
  for (const files::TensorInfo& info : writer.order()) {
    writer.write(is_supported_float(info.dtype) ? average(checkpoints, factors, info.name)
                                                : common(checkpoints, info.name));
  }
  writer.commit();
}

namespace {

// Returns errno, for which Python raises OSError.
int64_t average_for_python(const std::vector<std::string>& paths, const std::string& out,
                           const std::optional<std::vector<double>>& weights) {
  try {
    average_checkpoints(paths, out, weights);
  } catch (const files::FileError& error) {
    return error.code;
  }
  return 0;
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_average_checkpoints", average_for_python);
}

}  // namespace
}  // namespace shoestring
