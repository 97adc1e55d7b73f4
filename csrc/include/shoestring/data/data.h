#pragma once

// Prepares batches ahead of the training step, copies them to its device, and mixes their rows.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring::data {

class PrefetchRing;
using Batch = std::vector<at::Tensor>;

struct SHOESTRING_API PrefetcherOptions {
  PrefetcherOptions(c10::Device device) : device_(device) {}
  /// Device of the tensors that next() returns. Without an index, the current device of its type.
  TORCH_ARG(c10::Device, device);
  /// Number of batches that exist at a time: the batch in use, and `depth - 1` batches that are read ahead.
  /// On a device, each has pinned host memory and device memory of the size of the largest batch.
  TORCH_ARG(int64_t, depth) = 2;
  /// Number of the first batch.
  TORCH_ARG(int64_t, start) = 0;
  /// Number after that of the last batch. Without it, the source says when it has ended.
  TORCH_ARG(std::optional<int64_t>, stop) = std::nullopt;
  /// For debugging: fill the device memory of a batch with 0xFF bytes (NaN, -1) when next() takes it back, so
  /// that code which still reads the batch shows. Has nothing to fill on the CPU.
  TORCH_ARG(bool, poison) = false;
};

/// The pinned host memory of the batch that a source is reading. A source that writes its batch there saves
/// the copy to pinned memory.
class SHOESTRING_API HostBuffers {
 public:
  /// Returns an uninitialised, contiguous CPU tensor. It is valid until the source returns; so are its views.
  /// The tensor is in ordinary memory, from where it is copied later, if the device is the CPU or if the
  /// batch is larger than all batches before it.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

 private:
  friend class Prefetcher;
  explicit HostBuffers(PrefetchRing& ring) : ring_(ring) {}
  PrefetchRing& ring_;
};

/// Reads batches on a thread of its own, one step ahead, and copies them to the device on a stream of its
/// own. The Python counterpart is shoestring.data.Prefetcher. Example:
///
///     shoestring::data::Prefetcher batches(
///         [&](int64_t number) { return shoestring::data::Batch{inputs_of(number), labels_of(number)}; },
///         shoestring::data::PrefetcherOptions(device).start(resumed).stop(1000));
///     while (const auto batch = batches.next()) {
///       loss_of(model, *batch).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// The tensors of a batch have the values, sizes and dtypes that the source returned, and its strides if they
/// are dense. They are valid until the following call of next(), which takes their memory back once the work
/// that is in the current stream at that time has ended. Work on other streams must have joined the current
/// stream by then. Autograd raises if a later backward needs a tensor of an earlier batch. On the CPU next()
/// returns the source's own tensors, which stay valid.
///
/// Memory: `depth` times the largest batch, on the device and in pinned host memory. It grows if a batch is
/// larger than all batches before it. The host does not wait for the device until it is `depth` batches
/// ahead.
///
/// next() must be called by one thread at a time: a call while another thread is in next() raises. The source
/// runs on another thread, one call after the other, and its operators use one thread. In a forked child,
/// next() raises; destruction is safe.
class SHOESTRING_API Prefetcher {
 public:
  /// Returns the batch of this number, in dense tensors on the CPU, or nullopt if there is none any more. If
  /// the batch depends on nothing but the number, a run resumes with PrefetcherOptions::start.
  using Source = std::function<std::optional<Batch>(int64_t number)>;
  using FillingSource = std::function<std::optional<Batch>(int64_t number, HostBuffers& buffers)>;

  /// Starts reading. Throws c10::Error if an option is invalid.
  Prefetcher(Source source, const PrefetcherOptions& options);
  Prefetcher(FillingSource source, const PrefetcherOptions& options);
  /// Waits until the source has returned, and until copies that have begun are done.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// Returns the next batch on the device, or nullopt after the last batch. Waits on the host only if the
  /// batch has not been read yet; the current stream waits for the copy. Rethrows the source's exception for
  /// this batch, again at each later call. Throws c10::Error if another thread is in next().
  std::optional<Batch> next();
  /// Returns the number of the batch that next() returns next. A checkpoint stores it. Any thread may call
  /// position() and seconds_waited().
  int64_t position() const;
  /// Returns the seconds that next() has waited for the source. The time in which the host waits because the
  /// device is behind does not count.
  double seconds_waited() const;

 private:
  struct Reader;
  std::shared_ptr<Reader> reader_;
};

struct SHOESTRING_API MixOptions {
  MixOptions(int64_t seed, int64_t step) : seed_(seed), step_(step) {}
  /// Seed of the run. Processes that train on different batches need different seeds.
  TORCH_ARG(int64_t, seed);
  /// Number of the training step, at least 0. Each step draws other numbers.
  TORCH_ARG(int64_t, step);
  /// The parts of the rows have the distribution Beta(alpha, alpha). The default is 0.2 for mixup and 1 for
  /// cutmix.
  TORCH_ARG(std::optional<double>, alpha) = std::nullopt;
  /// If true, each row has a part, and in cutmix a box, of its own. If false, the batch has one.
  TORCH_ARG(bool, per_row) = false;
};

/// A mixed batch. Pass target2 and mix to the options of cross_entropy and linear_cross_entropy.
struct Mixed {
  at::Tensor inputs, target, target2;
  /// The part of `target`, fp32 on the device of inputs: shape (), or with per_row that of target.
  at::Tensor mix;
};

/// Mixes each row of a batch with another row: inputs become mix * inputs + (1 - mix) * others, in fp32 for
/// 16-bit inputs, and target2 holds the targets of the others. inputs (rows, ...) fp32, fp64, bf16 or fp16;
/// target (rows, ...) of any dtype. Row i is mixed with row (i + shift) % rows, for a random shift, so a row
/// is mixed with itself only if it is the only one. Differentiable with respect to inputs.
///
/// The result depends on the arguments alone, so a resumed run repeats it. It has the same bytes in Python.
/// Random numbers are drawn on the host, which does not wait for the device. Example:
///
///     const auto mixed = shoestring::data::mixup(images, labels, shoestring::data::MixOptions(seed, step));
///     shoestring::cross_entropy(model(mixed.inputs), mixed.target,
///                               CrossEntropyOptions().target2(mixed.target2).mix(mixed.mix))
///         .backward();
///
/// Method: mixup (arXiv 1710.09412).
SHOESTRING_API Mixed mixup(const at::Tensor& inputs, const at::Tensor& target, const MixOptions& options);

/// Replaces a box in each image by the box at the same place in another image; otherwise like mixup(). inputs
/// (rows, ..., height, width) of any dtype. The sides of the box are sqrt(1 - part) times those of the image,
/// rounded down, where `part` is drawn from Beta(alpha, alpha). The centre of the box is any pixel, and the
/// box is clipped at the edges. `mix` is the exact share of the pixels that is left.
///
/// Method: CutMix (arXiv 1905.04899).
SHOESTRING_API Mixed cutmix(const at::Tensor& inputs, const at::Tensor& target, const MixOptions& options);

}  // namespace shoestring::data
